"""Several inputs side by side give what each gives alone, and so does what depends on none of them."""

import torch
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.wide import Wide, WideSideBySide


class Biased(nn.Module):
    """x [B, 3] to a sum, a pair that is split, and a table of as many rows as there are runs."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 4)
        self.table = nn.Parameter(torch.arange(8.0).view(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = self.map(x).chunk(2, -1)
        return torch.cat([other, one], -1) + self.table.exp()[0], other.mean()


def test_runs_side_by_side_are_those_of_each_alone() -> None:
    runs = [(torch.randn(2, 3),), (torch.randn(5, 3),)]
    graph = capture("biased", Biased(), runs[0]).module
    names = [node.name for node in graph.graph.nodes if node.op != "output"]
    together = WideSideBySide(graph, names)
    answers = together.run(*runs)
    for index, given in enumerate(runs):
        alone = Wide(graph, names)
        torch.testing.assert_close(answers[index], alone.run(*given), rtol=0, atol=0)
        for name in names:
            torch.testing.assert_close(together.kept[name][index], alone.kept[name], rtol=0, atol=0)
