"""The passes of ours among coremltools' own, for our conversions and for anyone's `ct.convert`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from attnrewrite.errors import unknown_name
from attnrewrite.targets.coreml.passes import (
    attention_by_heads,
    channels_first,
    epsilons_in_half,
    gathers_as_slices,
    low_rank,
    masks_in_half,
    merge_axes,
    merge_moves,
    narrow_kernels,
    norms_folded,
    sums_of_stacks,
    transposes_down,
    views,
)

NAMESPACE = "attnrewrite"
# coremltools' own pass for high ranks would make chains of a dozen transposes, and leave what is no plain permutation.
HIGH_RANKS = "common::expand_high_rank_reshape_and_transpose"
# Values must have names of their own before float16 is put in; after it, one value may have two precisions.
SETTLED = "common::dedup_op_and_var_names"


@dataclass(frozen=True)
class MilPass:
    """One pass: `apply` edits a block and says how often; it stands `before` one of coremltools', for a reason."""

    name: str
    apply: Callable[[Any], int]
    before: str
    why: str

    @property
    def identifier(self) -> str:
        return f"{NAMESPACE}::{self.name}"


# Those that a package needs to be one at all, in their order.
NEEDED = (
    MilPass("five_axes", merge_axes.apply, HIGH_RANKS, "operators lose axes that they treat alike; movement is left"),
    MilPass("low_rank", low_rank.apply, HIGH_RANKS, "then movement through more than five axes is said in fewer"),
)
# Those that lay a program out for the engine, in their order.
ENGINE = (
    MilPass("gathers_as_slices", gathers_as_slices.apply, SETTLED, "slices are movement, which the others see through"),
    MilPass("masks_in_half", masks_in_half.apply, SETTLED, "while masks are still whole constants"),
    MilPass("epsilons_in_half", epsilons_in_half.apply, SETTLED, "and before elementwise operators move"),
    MilPass("norms_folded", norms_folded.apply, SETTLED, "tokens are flattened into the batch for a batch norm alone"),
    MilPass("sums_of_stacks", sums_of_stacks.apply, SETTLED, "stacks have an axis that no layout has, sums have not"),
    MilPass(
        "four_axes", partial(merge_axes.apply, linear=4, others=4), SETTLED,
        "linear layers and products of rank 4 are what the next passes know",
    ),
    MilPass("shorten", merge_moves.apply, SETTLED, "merged axes leave reshapes to and fro, which hide attention"),
    MilPass("channels_first", channels_first.apply, SETTLED, "from the first convolution on, in the program's order"),
    MilPass(
        "attention_by_heads", attention_by_heads.apply, SETTLED,
        "queries, keys and values are then slices of a convolution's channels",
    ),
    MilPass("channels_first_again", channels_first.apply, SETTLED, "what reads attention finds it in the layout now"),
    MilPass(
        "transposes_down", transposes_down.apply, SETTLED,
        "what is left is between operators that no layout has: other forms' products, sums and norms by head",
    ),
    MilPass("merge_moves", merge_moves.apply, SETTLED, "what is left of the movement, in as few steps as it takes"),
    MilPass("narrow_kernels", narrow_kernels.apply, SETTLED, "the others look for whole convolutions"),
)  # fmt: skip
LAYOUTS = {"engine": (*NEEDED, *ENGINE), "as-is": NEEDED}


def coreml_pipeline(layout: str = "engine") -> Any:
    """coremltools' default PassPipeline with ours in it: `ct.convert(..., pass_pipeline=coreml_pipeline())`.

    `layout` is "engine", or "as-is" for the exporter's own. InputError for any other.
    """
    import coremltools as ct

    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    edited = ct.PassPipeline.DEFAULT
    for each in LAYOUTS[layout]:
        _register(each)
        edited.insert_pass(edited.passes.index(each.before), each.identifier)
    return edited


def _register(each: MilPass) -> None:
    """Make the pass known to coremltools, once."""
    from coremltools.converters.mil.mil.passes.graph_pass import AbstractGraphPass
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY, register_pass

    if each.identifier in PASS_REGISTRY:
        return

    class Registered(AbstractGraphPass):
        def apply(self, prog: Any) -> None:
            for function in prog.functions.values():
                with function:
                    each.apply(function)
                    views.drop_unread(function)

    register_pass(namespace=NAMESPACE, name=each.name)(Registered)
