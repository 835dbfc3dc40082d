"""A graph run node by node is the graph, and in float64 what a wide copy of it gives, but for what is made of weights
alone; named values are kept.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.frontends.capture import capture
from attnrewrite.passes.wide import Recording, Wide


class Biased(nn.Module):
    """x [B, 3] to a sum, a pair that is split, and a table that no input reaches, rounded as autocast does."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(3, 4)
        self.table = nn.Parameter(torch.arange(8.0).view(2, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        one, other = self.map(x).chunk(2, -1)
        return torch.cat([other, one], -1) + self.table.exp().bfloat16()[0], other.mean().float()


def test_a_graph_node_by_node_gives_what_it_gives_and_keeps_what_is_named() -> None:
    given = (torch.randn(2, 3),)
    graph = capture("biased", Biased(), given).module
    linear = next(node.name for node in graph.graph.nodes if "linear" in str(node.target))
    for recording, kind in ((Recording(graph, [linear]), torch.float32), (Wide(graph, [linear]), torch.float64)):
        reference = copy.deepcopy(graph).to(kind)
        answer = recording.run(*given)
        mapped = F.linear(given[0].to(kind), reference.map.weight, reference.map.bias)
        wanted = torch.cat(mapped.chunk(2, -1)[::-1], -1) + graph.table.exp().bfloat16()[0].to(kind)
        torch.testing.assert_close(answer[0], wanted, rtol=0, atol=0)
        assert answer[1].dtype == kind  # a cast to float32 in the graph is one to float64 here
        assert list(recording.kept) == [linear]
        torch.testing.assert_close(recording.kept[linear], mapped, rtol=0, atol=0)


class Queried(nn.Module):
    """x [B, 3, 4] to what learned queries, through a map of two factors, and another map, see of it."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.left, self.right = (nn.Parameter(torch.randn(*size)) for size in ((1, 2, 4), (4, 2), (2, 4)))
        self.map = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.map(self.queries) @ (self.left @ self.right)
        return queries.expand(len(x), -1, -1) @ x.transpose(1, 2)


def test_learned_queries_are_projected_in_float64_by_weights_as_the_model_makes_them() -> None:
    model, x = Queried().half(), torch.randn(2, 3, 4).half()
    answer = Wide(capture("queried", model, (x,)).module).run(x)
    mapped = F.linear(*(tensor.double() for tensor in (model.queries, model.map.weight, model.map.bias)))
    wanted = mapped @ (model.left @ model.right).double() @ x.double().transpose(1, 2)
    torch.testing.assert_close(answer, wanted, rtol=1e-14, atol=1e-14)
