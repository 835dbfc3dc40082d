"""Layers over tokens computed with the channels first: 1x1 convolutions, norms over axis 1, elementwise as they come.

Apple's advice (Deploying Transformers on the Apple Neural Engine, 2022): the engine holds four axes, channels first,
and pads the last, so that tokens belong there. Linear layers always enter the layout; what is elementwise, normalises,
reduces or concatenates does where all that it reads is in the layout already, or takes a transpose anyway, so that none
is added for it. Windows and patches are tokens in another order: layers stand before they are cut out, where they can.
"""

from collections.abc import Callable
from typing import Any

from attnrewrite.targets.coreml.operators import arithmetic
from attnrewrite.targets.coreml.passes import channels, views

_OPERANDS = ("x", "y")


def apply(block: Any) -> int:
    """Compute what can be in the engine's layout; how many operators that were."""
    edits = 0
    for operation in list(block.operations):
        rewrite = RULES.get(operation.op_type)
        made = None if rewrite is None else rewrite(operation)
        if made is None:
            continue
        output = operation.outputs[0]
        moved = views.reshaped(made, output.shape, operation)
        edits += bool(block.try_replace_uses_of_var_after_op(anchor_op=operation, old_var=output, new_var=moved))
    return edits


def _linear(operation: Any) -> Any | None:
    from coremltools.converters.mil.mil import Builder

    x, weight, bias = (operation.inputs.get(name) for name in ("x", "weight", "bias"))
    if not channels.is_held(x) or weight.val is None or (bias is not None and bias.val is None):
        return None
    given = {"weight": weight.val[:, :, None, None]} | ({} if bias is None else {"bias": bias.val})
    held = channels.tokens_of(x)
    moved = None if held is None else channels.as_tokens(held, weight.shape[0])
    if held is not None and moved is not None:
        # Tokens are moved, into windows say, behind the layer, which is for each of them.
        made = views.write(moved, Builder.conv(x=held.base, **given, before_op=operation), operation)
        if made is not None:
            return made
    return _left(Builder.conv(x=channels.entered(x, operation), **given, before_op=operation), x, operation)


def _left(twin: Any, like: Any, before: Any) -> Any:
    moved = channels.places(like.shape)
    assert moved is not None
    return channels.left(twin, moved, before)


def _layer_norm(operation: Any) -> Any | None:
    from coremltools.converters.mil.mil import Builder

    x = operation.inputs["x"]
    if operation.inputs.get("axes") is None or not _over_channels(operation) or not _enters(x):
        return None
    given = {name: each for name, each in operation.inputs.items() if each is not None and name not in ("x", "axes")}
    twin = Builder.layer_norm(x=channels.entered(x, operation), axes=[1], **given, before_op=operation)
    return _left(twin, x, operation)


def _over_channels(operation: Any) -> bool:
    return [int(axis) % operation.inputs["x"].rank for axis in operation.inputs["axes"].val] == [
        operation.inputs["x"].rank - 1
    ]


def _enters(variable: Any) -> bool:
    """Whether an operand can be in the layout at no more transposes than it takes to have it as it is."""
    return channels.is_free(variable) or channels.is_turned(variable)


def _elementwise(operation: Any) -> Any | None:
    from coremltools.converters.mil.mil import Builder

    output = operation.outputs[0]
    operands = {name: operation.inputs[name] for name in _OPERANDS if operation.inputs.get(name) is not None}
    computed = [each for each in operands.values() if each.val is None]
    moved = channels.places(output.shape)
    if moved is None or not computed:
        return None
    if any(each.shape != output.shape or not _enters(each) for each in computed):
        return None
    given = {name: each for name, each in operation.inputs.items() if each is not None}
    for name, each in operands.items():
        if each.val is None:
            given[name] = channels.entered(each, operation)
        elif each.rank:
            given[name] = channels.constant(each.val, moved)
    twin = getattr(Builder, operation.op_type)(**given, before_op=operation)
    return channels.left(twin, moved, operation)


def _reduction(operation: Any) -> Any | None:
    from coremltools.converters.mil.mil import Builder

    x, axes = operation.inputs["x"], operation.inputs.get("axes")
    if axes is None or axes.val is None or not channels.is_free(x):
        return None
    moved = channels.places(x.shape)
    assert moved is not None
    along = [moved[int(axis) % x.rank] for axis in axes.val]
    twin = getattr(Builder, operation.op_type)(
        x=channels.entered(x, operation), axes=along, keep_dims=True, before_op=operation
    )
    return channels.left(twin, moved, operation)


def _concat(operation: Any) -> Any | None:
    from coremltools.converters.mil.mil import Builder

    output, values = operation.outputs[0], operation.inputs["values"]
    interleave = operation.inputs.get("interleave")
    moved = channels.places(output.shape)
    if moved is None or (interleave is not None and interleave.val):
        return None
    computed = [each for each in values if each.val is None]
    if not computed or not all(_enters(each) and channels.places(each.shape) == moved for each in computed):
        return None
    if all(each.shape[-1] == 1 for each in values):
        return None  # columns, which may be channels of a head
    place = moved[int(operation.inputs["axis"].val) % output.rank]
    parts = [
        channels.entered(each, operation) if each.val is None else channels.constant(each.val, moved) for each in values
    ]
    return channels.left(Builder.concat(values=parts, axis=place, before_op=operation), moved, operation)


RULES: dict[str, Callable[[Any], Any | None]] = {
    "linear": _linear,
    "layer_norm": _layer_norm,
    "concat": _concat,
    **dict.fromkeys(arithmetic.ELEMENTWISE, _elementwise),
    **dict.fromkeys(arithmetic.REDUCTIONS, _reduction),
}
