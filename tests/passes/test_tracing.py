"""What is exported tells no lines of code that made it, and torch is left as it was."""

from collections.abc import Iterator

import pytest
import torch
import torch.fx.config
import torch.fx.traceback
from torch import Tensor, nn

from attnrewrite.passes.tracing import decompose_program, export_program


@pytest.fixture
def notes_kept() -> Iterator[None]:
    with torch.fx.traceback.preserve_node_meta():
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).softmax(-1).sum(0)


@pytest.mark.usefixtures("notes_kept")
def test_nodes_know_neither_their_lines_nor_what_they_were_made_from() -> None:
    other, *given = Block().eval(), Block().eval(), (torch.randn(2, 4),)
    told = torch.export.export(other, given[1])
    assert any(node.stack_trace and __file__ in node.stack_trace for node in told.graph.nodes)
    assert any(node.meta.get("custom") for node in told.graph.nodes)
    for program in (export_program(*given), decompose_program(export_program(*given), {})):
        nodes = [node for node in program.graph.nodes if node.op == "call_function"]
        assert [node for node in nodes if node.stack_trace] == []
        assert [node for node in program.graph.nodes if {"from_node", "custom"} & node.meta.keys()] == []
        torch.testing.assert_close(program.module()(*given[1]), given[0](*given[1]))


def test_torch_notes_them_again_behind_an_export_that_failed() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        export_program(Odd(), (torch.randn(2, 4),))
    assert torch.fx.config.do_not_emit_stack_traces is False
