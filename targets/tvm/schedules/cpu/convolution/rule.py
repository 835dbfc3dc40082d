"""Convolutions: as products of weights and windows, in the orientation that writes neighbours; a channel by itself as
a sum over the window's elements.
"""

import math

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly, expanded
from attnrewrite.targets.tvm.schedules.cpu.convolution.depthwise import Depthwise, DepthwiseTokens
from attnrewrite.targets.tvm.schedules.cpu.operands import FEWEST_LANES, side_by_side
from attnrewrite.targets.tvm.schedules.cpu.strassen.rule import multiply_by_strassen
from attnrewrite.targets.tvm.schedules.cpu.windows import Windows, pair, sides
from attnrewrite.targets.tvm.schedules.expression import Arguments, Expression, Leaf, moved, ordered
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import Profile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import Traced, operand, trace
from attnrewrite.targets.tvm.schedules.view import Layout, Shape, View, contiguous

MOST_TAPS = 49  # elements of a window that are written out one after the other


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, ("relax.nn.conv2d",))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    attributes = node.attrs
    layouts = (str(attributes.data_layout), str(attributes.kernel_layout), str(attributes.out_layout))
    if layouts != ("NCHW", "OIHW", "NCHW"):
        return Refusal("layout", f"is a convolution in the layouts {', '.join(layouts)}")
    weight = call.graph.constant(node.args[1])
    if weight is None:
        return Refusal("weights", "is a convolution with computed weights")
    *_, height, width = shape(traced.anchor)
    windows = Windows(
        (weight.shape[2], weight.shape[3]),
        pair(attributes.strides),
        pair(attributes.dilation),
        sides(attributes.padding),
    )
    source = operand(call.graph, node.args[0])
    assembly = Assembly((*traced.covers, *source.covers))
    space, groups = shape(node.args[0]), int(attributes.groups)
    if groups == space[1] and math.prod(windows.size) <= MOST_TAPS:
        tokens = call.graph.view(node.args[0])
        if groups == weight.shape[0] and tokens.layout.strides[1] == traced.out.strides[1] == 1:
            return _by_channel_of_tokens(call, traced, tokens, windows, weight)
        return _by_channel(call, traced, assembly, source.expression, windows, weight)
    image = windows.image(assembly, source.expression, space, (height, width), 0.0)
    seen = View(image.base, windows.over(image.layout, (height, width)))
    if groups == 1 and traced.out.strides[1] == 1:
        return _tokens(call, traced, assembly, seen, weight, profile)
    return _images(call, traced, assembly, seen, weight, groups, profile)


def _tokens(call: Call, traced: Traced, assembly: Assembly, seen: View, weight: np.ndarray, profile: Profile) -> Kernel:
    """Windows times weights: the channels of a place are neighbours in the result, as tokens have them."""
    channels, depth = weight.shape[0], weight[0].size
    order = (0, 4, 5, 1, 2, 3)
    batch, height, width, *_ = seen.layout.permute(order).shape
    rows = seen.layout.permute(order)
    flat = rows.reshape((batch, height, width, depth))
    left = (
        View(seen.base, flat)
        if flat is not None
        else _copied(assembly, View(seen.base, rows), (batch, height, width, depth))
    )
    weights = np.ascontiguousarray(weight.reshape(channels, depth).T)
    out, epilogue, written = traced.out.permute((0, 2, 3, 1)), ordered(traced.epilogue, (0, 2, 3, 1)), shape(call.var)
    if multiply_by_strassen(assembly, left, weights, out, epilogue, profile, written) is not None:
        right = expanded(Leaf(View(weights, contiguous(weights.shape))), (batch, height, depth, channels))
        assembly.product(Leaf(left), right, depth, out, epilogue, profile, written)
    return assembly.kernel()


def _images(
    call: Call, traced: Traced, assembly: Assembly, seen: View, weight: np.ndarray, groups: int, profile: Profile
) -> Kernel | Refusal:
    """Weights times windows: the places of a channel are neighbours in the result, as images have them."""
    batch, *_, height, width = seen.layout.shape
    channels, depth, places = weight.shape[0] // groups, weight[0].size, height * width

    def move(layout: Layout) -> Layout | None:
        return layout.reshape((batch, groups, channels, places))

    out, epilogue = move(traced.out), moved(traced.epilogue, move)
    if out is None or epilogue is None:
        return Refusal("layout", "writes or reads beside a convolution what has no flat image")
    right = _beside(assembly, seen, (batch, groups, depth, places))
    left = View(np.ascontiguousarray(weight.reshape(groups, channels, depth)), contiguous((groups, channels, depth)))
    assembly.product(
        expanded(Leaf(left), (batch, groups, channels, depth)),
        Leaf(right),
        depth,
        out,
        epilogue,
        profile,
        shape(call.var),
    )
    return assembly.kernel()


def _beside(assembly: Assembly, seen: View, space: Shape) -> View:
    """Windows over [batch, groups, depth, places], as they lie where enough of them are neighbours."""
    flat = seen.layout.reshape(space)
    if flat is not None:
        return View(seen.base, flat)
    split = seen.layout.reshape((*space[:2], seen.layout.shape[1] // space[1], *seen.layout.shape[2:]))
    if split is None or side_by_side(split.shape[-2:]) < FEWEST_LANES:
        return _copied(assembly, seen, space)
    return View(seen.base, split)


def _copied(assembly: Assembly, windows: View, space: tuple[int, ...]) -> View:
    """Windows written out one after the other, in another shape."""
    made = assembly.copy(Leaf(windows), windows.layout.shape)
    flat = made.layout.reshape(space)
    assert flat is not None
    return View(made.base, flat)


def _by_channel(
    call: Call, traced: Traced, assembly: Assembly, image: Expression, windows: Windows, weight: np.ndarray
) -> Kernel:
    """Each channel's windows times its own weights."""
    node = call.graph.call(traced.anchor)
    assert node is not None
    space, channels = shape(node.args[0]), weight.shape[0]
    arguments = Arguments()
    read = arguments.loading(image)
    factors = View(np.ascontiguousarray(weight.reshape(channels, -1)), contiguous((channels, weight[0].size)))
    kernel = Depthwise(
        read,
        space,
        windows,
        arguments.load(factors),
        channels // space[1],
        traced.out,
        arguments.loading(traced.epilogue),
    )
    assembly.add(kernel, arguments.bases, shape(call.var))
    return assembly.kernel()


def _by_channel_of_tokens(call: Call, traced: Traced, image: View, windows: Windows, weight: np.ndarray) -> Kernel:
    """Each channel's windows times its own weights, where the channels of a place are neighbours before and after."""
    arguments, assembly, order = Arguments(), Assembly(traced.covers), (0, 2, 3, 1)
    read = arguments.load(View(image.base, image.layout.permute(order)))
    factors = np.ascontiguousarray(weight.reshape(len(weight), -1).T)
    kernel = DepthwiseTokens(
        read,
        windows,
        arguments.load(View(factors, contiguous(factors.shape))),
        traced.out.permute(order),
        arguments.loading(ordered(traced.epilogue, order)),
    )
    assembly.add(kernel, arguments.bases, shape(call.var))
    return assembly.kernel()


CONVOLUTION = Rule("convolution", _apply)
