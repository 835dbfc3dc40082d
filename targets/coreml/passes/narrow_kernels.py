"""Convolutions with kernels wider than the engine takes, as a sum of narrower ones.

Columns of the kernel are shared out, and each share reads its own window of the input. Patch embeddings of 14 and 16
columns are the usual case.
"""

import math
from typing import Any

import numpy as np

from attnrewrite.targets.coreml.passes import views

WIDEST_KERNEL = 13
PADDINGS = ("valid", "custom")


def apply(block: Any) -> int:
    """Split every convolution whose kernel is too wide; how many."""
    return sum(_split(each, block) for each in list(block.operations) if each.op_type == "conv")


def _split(conv: Any, block: Any) -> bool:
    from coremltools.converters.mil.mil import Builder

    x, weight = conv.inputs["x"], conv.inputs["weight"].val
    if weight is None or weight.shape[-1] <= WIDEST_KERNEL or not views.is_static(x):
        return False
    if conv.inputs["pad_type"].val not in PADDINGS:
        return False
    rank = weight.ndim - 2  # of the axes that the kernel moves along
    pad = np.zeros(2 * rank, np.int32) if conv.inputs["pad_type"].val == "valid" else np.array(conv.inputs["pad"].val)
    strides, dilations = conv.inputs["strides"].val, conv.inputs["dilations"].val
    length, outputs = int(x.shape[-1]), int(conv.outputs[0].shape[-1])
    made, bias = None, conv.inputs.get("bias")
    for columns in np.array_split(np.arange(weight.shape[-1]), math.ceil(weight.shape[-1] / WIDEST_KERNEL)):
        start = int(columns[0] * dilations[-1] - pad[-2])
        stop = int((outputs - 1) * strides[-1] + columns[-1] * dilations[-1] - pad[-2] + 1)
        if stop <= 0 or start >= length:
            continue  # these columns see the padding alone
        own = pad.copy()
        own[-2:] = max(0, -start), max(0, stop - length)
        part = Builder.conv(
            x=_window(x, max(0, start), min(stop, length), conv),
            weight=np.ascontiguousarray(weight[..., columns]),
            bias=None if made is not None else bias,
            strides=strides,
            dilations=dilations,
            groups=conv.inputs["groups"].val,
            pad_type="custom",
            pad=own,
            before_op=conv,
        )
        made = part if made is None else Builder.add(x=made, y=part, before_op=conv)
    old = conv.outputs[0]
    return made is not None and bool(block.try_replace_uses_of_var_after_op(anchor_op=conv, old_var=old, new_var=made))


def _window(x: Any, start: int, stop: int, conv: Any) -> Any:
    """x[..., start:stop], before a convolution."""
    from coremltools.converters.mil.mil import Builder

    if (start, stop) == (0, int(x.shape[-1])):
        return x
    begin, end = np.zeros(x.rank, np.int32), np.zeros(x.rank, np.int32)
    begin[-1], end[-1] = start, stop
    whole = [axis < x.rank - 1 for axis in range(x.rank)]
    return Builder.slice_by_index(x=x, begin=begin, end=end, begin_mask=whole, end_mask=whole, before_op=conv)
