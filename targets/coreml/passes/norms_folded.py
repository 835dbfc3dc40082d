"""A batch norm behind a linear layer, with nothing but movement in between, is part of the layer.

coremltools folds those behind convolutions; behind a linear layer a model flattens tokens into the batch for them,
and that stands in no layout.
"""

from typing import Any

import numpy as np
import torch

from attnrewrite.targets.coreml.passes import views


def apply(block: Any) -> int:
    """Fold every such batch norm; how many."""
    return sum(_folded(each, block) for each in list(block.operations) if each.op_type == "batch_norm")


def _folded(norm: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    normalised = norm.inputs["x"]
    found = views.origin(normalised, _is_layer)
    if found is None or not _read_once(normalised, found.base):
        return False
    layer, width = found.base.op, int(found.base.shape[-1])
    channels = (found.index % width).movedim(1, -1)
    if channels.shape[-1] != width or bool((channels != torch.arange(width)).any()):
        return False
    scale, shift = _affine(norm)
    weight, bias = layer.inputs["weight"].val, layer.inputs.get("bias")
    made = Builder.linear(
        x=layer.inputs["x"],
        weight=(weight * scale[:, None]).astype(weight.dtype),
        bias=(shift if bias is None else bias.val * scale + shift).astype(weight.dtype),
        before_op=layer,
    )
    replace = block.try_replace_uses_of_var_after_op
    return bool(replace(anchor_op=layer, old_var=found.base, new_var=made)) and bool(
        replace(anchor_op=norm, old_var=norm.outputs[0], new_var=normalised)
    )


def _is_layer(variable: Any) -> bool:
    operation = variable.op
    if operation is None or operation.op_type != "linear" or operation.inputs["weight"].val is None:
        return False
    bias = operation.inputs.get("bias")
    return bias is None or bias.val is not None


def _read_once(variable: Any, base: Any) -> bool:
    """Whether nothing else reads `variable`, or anything that it was moved from, back to `base`."""
    while len(variable.child_ops) == 1 and not variable.consuming_blocks:
        if variable is base:
            return True
        variable = variable.op.inputs["x"]
    return False


def _affine(norm: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a batch norm multiplies by and adds, by channel, in float64."""
    gamma, beta = norm.inputs.get("gamma"), norm.inputs.get("beta")
    variance, mean = (norm.inputs[name].val.astype(np.float64) for name in ("variance", "mean"))
    scale = 1 / np.sqrt(variance + norm.inputs["epsilon"].val)
    scale = scale if gamma is None else scale * gamma.val
    shift = -mean * scale
    return scale, shift if beta is None else shift + beta.val
