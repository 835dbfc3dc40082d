"""What must be true of a model before its attention is looked at: numbers, one answer for one input, and a graph that
is the model on inputs that it was not captured on.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError, Refusal, first_line
from attnrewrite.passes.copying import without_torch_logs
from attnrewrite.passes.draws import Draw
from attnrewrite.passes.verify import HALF_STEPS, MOST_MISMATCH, Run, discrete_mismatch, known_error, outputs
from attnrewrite.passes.wide import Recording
from attnrewrite.patterns.fx.operators import draws_numbers

GRAPH_TOLERANCE = 1e-4  # the graph's operations are the model's own, but for the order of the sums in an einsum


class CheckedStateless(nn.Module):
    """`module`, called `name` in messages. A call raises InputError where it changes a buffer or an input: the answer
    would depend on earlier calls.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.name, self.module = name, module

    def forward(self, *inputs: Tensor) -> Any:
        before = {buffer: tensor._version for buffer, tensor in self.module.named_buffers()}
        given = [tensor.clone() for tensor in inputs]
        known = [tensor._version for tensor in given]
        answer = self.module(*given)
        if known != [tensor._version for tensor in given]:
            raise InputError(f"{self.name} changes its input in place as it runs: have forward work on a copy")
        buffers = self.module.named_buffers()
        changed = [buffer for buffer, tensor in buffers if tensor._version != before.get(buffer)]
        if changed:
            raise InputError(
                f"{self.name} changes its own buffer {changed[0]} as it runs, so that one input has many answers: "
                "take the update out of forward"
            )
        return answer


@dataclass(frozen=True)
class Agreement:
    """How far a graph is from its model at most, what it did on the draws that both took, and why the model took no
    others.
    """

    error: float
    runs: tuple[Run, ...]
    refused: Mapping[str, str]


def require_numbers(name: str, tensors: Mapping[str, Tensor], example: Sequence[Tensor]) -> None:
    """Raise InputError where a weight or an example input holds NaN or infinity: nothing could be compared then.

    Masks hold negative infinity, and buffers that look for the least number start from infinity.
    """
    for index, tensor in enumerate(example):
        if what := _no_number(tensor):
            raise InputError(f"example input {index} of {name} holds {what}: give an example that the model answers")
    for weight, tensor in tensors.items():
        what = _no_number(tensor)
        if what == "NaN" or (what is not None and isinstance(tensor, nn.Parameter)):
            raise InputError(f"{name}: weight {weight} holds {what}: the checkpoint is damaged, or training diverged")


def _no_number(tensor: Tensor) -> str | None:
    if not tensor.is_floating_point() or not tensor.numel():
        return None
    if tensor.itemsize == 1:  # of which torch asks nothing
        tensor = tensor.float()
    if bool(tensor.sum().isfinite()):  # as it is only where all are: one pass, nothing written
        return None
    if bool(tensor.isnan().any()):
        return "NaN"
    return "infinity" if bool(tensor.isposinf().any()) else None


@torch.no_grad()
def agreement(
    name: str,
    model: nn.Module,
    graph: GraphModule,
    draws: Sequence[Draw],
    values: Collection[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Agreement:
    """Whether `graph`, captured from `model`, gives the model's outputs on each of `draws` that the model takes; the
    `values` of these nodes are kept of each run. `progress` receives the draws done and the draws there are.

    Raises:
        InputError: the model draws random numbers as it runs, or takes none of the draws.
        CheckFailedError: the outputs differ by more than GRAPH_TOLERANCE (in half precision, HALF_STEPS of its
            rounding, twice): what ran on the example was frozen.
    """
    recording, waiting, most = Recording(graph, values), deque(draws), 0.0
    runs: list[Run] = []
    refused: dict[str, str] = {}
    while waiting:
        done = len(runs) + len(refused)
        progress(done, done + len(waiting))
        draw = waiting.popleft()
        if (agreed := _agreed_alone(model, recording, draw)) is not None:
            runs.append(agreed[0])
            most = max(most, agreed[1])
            continue
        answer = _answer(model, draw)
        if isinstance(answer, Refusal):
            refused[draw.name] = answer.sentence
            waiting.extendleft(reversed(draw.fallbacks()))
        else:
            runs.append(_run(recording, draw))
            most = max(most, _require_agreement(name, graph, runs[-1], answer))
    if any(draws_numbers(node) for node in graph.graph.nodes):
        for run in runs:
            _require_repeatable(name, graph, run.draw)
    progress(len(runs) + len(refused), len(runs) + len(refused))
    if all(run.draw.is_example for run in runs):
        raise InputError(
            f"{name} takes none of the inputs that were drawn to check it ({next(iter(refused.values()), 'none')}): "
            "give an example in which every input shows the values that it may have"
        )
    return Agreement(most, tuple(runs), refused)


def _answer(model: nn.Module, draw: Draw) -> Any | Refusal:
    """What the model gives for `draw`, or why that says nothing: the model does not take it; or what was drawn last has
    no number for an answer, where one of the fallbacks may have one.
    """
    try:
        with without_torch_logs():
            answer = model(*draw.inputs)
        numbers = all(bool(each[-1:].isfinite().any()) for each in outputs(answer) if each.dim() and each.numel())
    except AttnRewriteError:
        raise
    except Exception as error:  # a model refuses an input in its own words
        return Refusal("not-taken", first_line(error))
    return answer if numbers or not draw.fallbacks() else Refusal("no-number", "the model answers with no number")


def _agreed_alone(model: nn.Module, recording: Recording, draw: Draw) -> tuple[Run, float] | None:
    """What the graph does on `draw`, and how far its answer to the last image is from the model's to that image alone,
    which spares the model the others. None where that is too far, as it is where images see each other, or where either
    does not take them: what they do with all of them decides then.
    """
    if draw.last_image is None:
        return None
    answer = _answer(model, replace(draw, inputs=draw.last_image))
    if isinstance(answer, Refusal):
        return None
    try:
        run = Run.of(recording, draw)
    except Exception:  # the graph's own words are told of the whole draw
        return None
    last = torch.utils._pytree.tree_map_only(Tensor, lambda each: each[-1:] if each.dim() else each, run.answer)
    difference = _difference(last, answer)
    return (run, difference) if difference <= _allowed(answer) else None


def _require_agreement(name: str, graph: GraphModule, run: Run, answer: Any) -> float:
    """How far the graph's answer is from the model's. Raises CheckFailedError where that is too far."""
    difference, allowed = _difference(run.answer, answer), _allowed(answer)
    if not difference <= allowed:
        _require_repeatable(name, graph, run.draw)
        raise CheckFailedError(
            f"{name}: the graph that torch.export captured differs from the model by {difference:.2e} (allowed "
            f"{allowed:.0e}) on {run.draw.name}: something that follows the input or an earlier call (a branch, a "
            "number taken out of a tensor, a cache) was frozen as the example had it; make forward follow its "
            "inputs by tensors alone"
        )
    return difference


def _run(recording: Recording, draw: Draw) -> Run:
    try:
        return Run.of(recording, draw)
    except Exception as error:
        raise CheckFailedError(
            f"the graph that torch.export captured does not take {draw.name}, which the model does "
            f"({first_line(error)}): it fixed a size or a type as the example had it"
        ) from error


def _difference(result: Any, answer: Any) -> float:
    found, wanted = outputs(result), outputs(answer)
    if [each.shape for each in found] != [each.shape for each in wanted] or discrete_mismatch(
        result, answer
    ) > MOST_MISMATCH:
        return float("inf")
    return max((known_error(*pair) for pair in zip(found, wanted, strict=True)), default=0.0)


def _allowed(answer: Any) -> float:
    return max(GRAPH_TOLERANCE, *(2 * HALF_STEPS * _rounding(each) for each in outputs(answer)), 0.0)


def _rounding(tensor: Tensor) -> float:
    half = tensor.dtype in (torch.float16, torch.bfloat16)
    return torch.finfo(tensor.dtype).eps if half else 0.0


def _require_repeatable(name: str, graph: GraphModule, draw: Draw) -> None:
    """Raise InputError where the same input has another answer the second time, saying what draws the numbers."""
    first, second = (outputs(graph(*draw.inputs)) for _ in range(2))
    if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)):
        return
    drawing = next((node.name for node in graph.graph.nodes if draws_numbers(node)), "a place that is not known")
    raise InputError(
        f"{name} answers the same input differently each time, as it draws random numbers at {drawing}: make forward "
        "repeatable (dropout stays active in evaluation mode where it is not told, as in "
        "F.dropout(x, training=self.training))"
    )
