"""Graphs that round to integers of a scale, compared with one another from rounding to rounding.

Where a number lies between two steps, the order of a sum decides which one it is rounded to, and everything behind
follows. So each rounding is compared by what it is given, as sums are, and goes on from one side's number on both.
"""

import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from attnrewrite.errors import CheckFailedError, first_line
from attnrewrite.passes.verify import Run, known_error, outputs
from attnrewrite.passes.wide import Recording, Wide

REWRITING_TOLERANCE = 1e-4  # each site's weights are rounded once as they are carried over, and layers add that up
_PREFIX = "step_of_"


def step_name(rounded: str) -> str:
    """The name of the buffer that marks the rounding whose integers are called `rounded`."""
    plain, own = re.sub(r"\W", "_", rounded), hashlib.blake2b(rounded.encode(), digest_size=3).hexdigest()
    return f"{_PREFIX}{plain}_{own}"


def roundings(module: GraphModule) -> dict[str, Node]:
    """What each rounding of a graph is given, by the name of the buffer that marks it."""
    found = {}
    for node in module.graph.nodes:
        name = str(node.target).rpartition(".")[2] if node.op == "get_attr" else ""
        if not name.startswith(_PREFIX):
            continue
        reader = next(iter(node.users))
        of_the_moment = any(operator in str(reader.target) for operator in ("maximum", "minimum"))  # its scale
        given = reader.args[0]
        found[name] = given.args[0] if of_the_moment else given
    return found


class FromRounding(Recording):
    """Runs `module`, each rounding from the number that `given` has for it, by name; `error` is the largest difference
    between these and the module's own, over the largest of them. `lacking` are the nodes of which there is none.
    """

    def __init__(self, module: GraphModule, given: Mapping[str, Tensor]) -> None:
        super().__init__(module)
        self.error = 0.0
        self.lacking: set[str] = set()
        self._given = {node.name: given.get(name) for name, node in roundings(module).items()}

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        if n.name not in self._given:
            return result
        wanted = laid_out(self._given[n.name], result.shape)
        if wanted is None:
            self.lacking.add(n.name)
            return result
        self.error = max(self.error, known_error(result, wanted))
        return wanted.to(result.dtype)


class _Moved(Recording):
    """Runs `module`, what the nodes called `moved` give far from what it is."""

    def __init__(self, module: GraphModule, moved: Collection[str]) -> None:
        super().__init__(module)
        self._moved = moved

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return 1.0 - 3.0 * result if n.name in self._moved else result


def matter(module: GraphModule, names: Collection[str], inputs: Sequence[Tensor]) -> bool:
    """Whether the answer to `inputs` depends on what the nodes called `names` give."""
    runs = (Recording(module), _Moved(module, names))
    own, moved = (outputs(run.run(*inputs)) for run in runs)
    return not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in zip(own, moved, strict=True))


def laid_out(value: Tensor | None, shape: torch.Size) -> Tensor | None:
    """`value` as `shape`, where that is its own but for axes of one, as a graph mapped over images has one more."""
    if value is None or [size for size in value.shape if size != 1] != [size for size in shape if size != 1]:
        return value
    return value.reshape(shape)


@torch.no_grad()
def rounded_values(module: GraphModule, *inputs: Tensor) -> dict[str, Tensor]:
    """What each rounding of a graph is given on `inputs`."""
    places = roundings(module)
    if not places:
        return {}
    recording = Recording(module, [node.name for node in places.values()])
    recording.run(*inputs)
    return {name: recording.kept[node.name] for name, node in places.items()}


@torch.no_grad()
def rewriting_error(original: GraphModule, identity: GraphModule, run: Run) -> float:
    """How far the whole model, every site softmax re-emitted, is from the original's `run`, from rounding to rounding
    where it has some; in float64 where it is beyond REWRITING_TOLERANCE as the model computes.

    Where the run's last image has the same answer alone, which shows that the graph takes batches of any size, the
    others are not run again; images that see each other are compared as they stood.

    Raises:
        CheckFailedError: by more than REWRITING_TOLERANCE, although each site alone is right; or the graph does not
            take an image alone.
    """
    alone = (
        None
        if run.draw.last_image is None or roundings(original)
        else _error_alone(identity, run.draw.last_image, run.answer)
    )
    if alone is not None and alone <= REWRITING_TOLERANCE:
        return alone
    compared = FromRounding(identity, rounded_values(original, *run.draw.inputs))
    error = max(_answers_apart(compared.run(*run.draw.inputs), run.answer), compared.error)
    error = math.inf if compared.lacking else error
    if not error <= REWRITING_TOLERANCE:
        error = _answers_apart(*(Wide(each).run(*run.draw.inputs) for each in (identity, original)))
    if not error <= REWRITING_TOLERANCE:
        raise CheckFailedError(
            f"with softmax re-emitted at every site the model differs from the original by {error:.2e} (allowed "
            f"{REWRITING_TOLERANCE:.0e}) on {run.draw.name}, although each site alone agrees; nothing was written"
        )
    return error


def _error_alone(identity: GraphModule, image: tuple[Tensor, ...], answer: Any) -> float:
    """How far the answer to an image alone is from that to the last of a batch."""
    try:
        found = outputs(Recording(identity).run(*image))
    except Exception as error:
        raise CheckFailedError(
            f"the graph does not take one image, but the batch that it was checked with ({first_line(error)}): "
            "it fixed a size as the batch had it"
        ) from error
    pairs = zip(found, outputs(answer), strict=True)
    return max((known_error(mine, among[-1:] if among.dim() else among) for mine, among in pairs), default=0.0)


def _answers_apart(found: Any, wanted: Any) -> float:
    pairs = zip(outputs(found), outputs(wanted), strict=True)
    return max((known_error(*pair) for pair in pairs), default=0.0)
