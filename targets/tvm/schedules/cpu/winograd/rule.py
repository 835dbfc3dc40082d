"""Convolutions of 3 x 3 by Winograd's algorithm, where that takes less time than to multiply as it is written."""

import math

import numpy as np

from attnrewrite.errors import Refusal
from attnrewrite.targets.tvm.schedules.cpu.assembly import Assembly
from attnrewrite.targets.tvm.schedules.cpu.operands import READ_WEIGHT
from attnrewrite.targets.tvm.schedules.cpu.packing import packed
from attnrewrite.targets.tvm.schedules.cpu.register_tile import best_tile
from attnrewrite.targets.tvm.schedules.cpu.windows import pair, sides
from attnrewrite.targets.tvm.schedules.cpu.winograd.kernels import Grid, Tiles, Winograd
from attnrewrite.targets.tvm.schedules.cpu.winograd.transforms import Scheme
from attnrewrite.targets.tvm.schedules.expression import Arguments, moved
from attnrewrite.targets.tvm.schedules.graph import shape
from attnrewrite.targets.tvm.schedules.profile import FLOAT32, SIZES, Profile, Tile
from attnrewrite.targets.tvm.schedules.rule import Call, Kernel, Rule
from attnrewrite.targets.tvm.schedules.trace import Traced, operand, trace
from attnrewrite.targets.tvm.schedules.view import Shape

# Points near those that lose least, whose products float32 holds: sums of large tiles are off by about twice as much as
# direct ones, where 1 and 2 would make it six times, and those of small tiles by half as much.
SMALL, LARGE = Scheme((1.0,)), Scheme((11 / 16, 11 / 8))
FEWEST_TILES, MOST_TILES = 14, 32  # of a task
FEWEST_TASKS = 4  # to share among threads
TRANSFORM = 20  # multiply-adds that take as long as to transform a channel of a place and back; fitted as READ_WEIGHT


def _apply(call: Call, profile: Profile) -> Kernel | Refusal:
    traced = trace(call.graph, call.var, ("relax.nn.conv2d",))
    if isinstance(traced, Refusal):
        return traced
    node = call.graph.call(traced.anchor)
    assert node is not None
    weight, groups = _weight(call, traced), int(node.attrs.groups)
    if weight is None:
        return Refusal("other-operator", "is no convolution of 3 x 3 at every place")
    if profile.stored != FLOAT32:
        return Refusal("precision", f"is a convolution of {profile.stored}, which holds too few digits of tiles")
    space, out = (_by_groups(shape(value), groups) for value in (node.args[0], traced.anchor))
    depth = weight.shape[1]
    scheme, grid = tiling(out, depth, profile)
    if _cost(scheme, grid, out, depth, profile) >= _direct(out):
        return Refusal("size", "is a convolution with too few channels or places to gain by Winograd's algorithm")
    source = operand(call.graph, node.args[0])
    value, epilogue = (
        moved(each, lambda layout: layout.reshape(_by_groups(layout.shape, groups)))
        for each in (source.expression, traced.epilogue)
    )
    written = traced.out.reshape(out)
    if value is None or epilogue is None or written is None:
        return Refusal("layout", "reads or writes groups of channels that no strides describe as images of their own")
    assembly, arguments = Assembly((*traced.covers, *source.covers)), Arguments()
    # Few tasks share tiles, and each has channels of the output.
    shared, read = out[0] * grid.blocks < FEWEST_TASKS, Arguments()
    seen = (read if shared else arguments).loading(value)
    tiles = Tiles(scheme, grid, seen, space, sides(node.attrs.padding)[:2])
    given = arguments.number(assembly.add(tiles, read.bases, tiles.shape)) if shared else None
    best = best_tile(profile, grid.tiles, out[1])
    tile = Tile(min(best.rows, grid.tiles), min(best.columns, out[1]))
    number = arguments.number(_panels(scheme, weight, groups, tile.columns))
    kernel = Winograd(tiles, given, number, groups, written, arguments.loading(epilogue), tile)
    assembly.add(kernel, arguments.bases, shape(call.var))
    return assembly.kernel()


def _weight(call: Call, traced: Traced) -> np.ndarray | None:
    """The weights of a convolution of 3 x 3 that leaves out no places; None for any other."""
    node = call.graph.call(traced.anchor)
    assert node is not None
    weight, attributes = call.graph.constant(node.args[1]), node.attrs
    layouts = (str(attributes.data_layout), str(attributes.kernel_layout), str(attributes.out_layout))
    if weight is None or layouts != ("NCHW", "OIHW", "NCHW") or weight.shape[2:] != (3, 3):
        return None
    return weight if pair(attributes.strides) == pair(attributes.dilation) == (1, 1) else None


def _by_groups(space: Shape, groups: int) -> Shape:
    """An image's shape where groups of its channels are images of their own."""
    batch, channels, *rest = space
    return (batch * groups, channels // groups, *rest)


def _panels(scheme: Scheme, weight: np.ndarray, groups: int, width: int) -> np.ndarray:
    """[groups, panels, size^2, depth, width]."""
    made = np.stack([scheme.of_weights(each) for each in np.split(weight, groups)])
    return np.ascontiguousarray(packed(made, width, shared=True).swapaxes(1, 2))


def tiling(out: Shape, depth: int, profile: Profile) -> tuple[Scheme, Grid]:
    """Large tiles where there are enough for tasks, each of which reads all weights; else small ones, all together, of
    which weights are fewer.
    """
    batch, _, height, width = out
    line = Grid(height, width, LARGE.places, 1)
    held = profile.l2 // (line.across * LARGE.size**2 * depth * SIZES[FLOAT32])
    wanted = min(MOST_TILES // line.across, held, batch * line.rows // FEWEST_TASKS)
    down = max(1, -(-FEWEST_TILES // line.across), wanted)
    blocks = -(-line.rows // down)
    if batch * blocks >= FEWEST_TASKS:
        return LARGE, Grid(height, width, LARGE.places, -(-line.rows // blocks))
    return SMALL, Grid(height, width, SMALL.places, -(-height // SMALL.places))


def _cost(scheme: Scheme, grid: Grid, out: Shape, depth: int, profile: Profile) -> float:
    """Multiply-adds that take as long as all that is done for a place and a pair of channels."""
    filled = sum(-(-channels // profile.lanes) * profile.lanes for channels in (out[1], depth))
    multiplied = scheme.size**2 * grid.blocks * (grid.tiles + READ_WEIGHT) / math.prod(out[2:])
    return multiplied + TRANSFORM * filled / (out[1] * depth)


def _direct(out: Shape) -> float:
    """The same where it is multiplied as it is written."""
    return 9 * (1 + READ_WEIGHT / math.prod(out[2:]))


WINOGRAD = Rule("winograd", _apply)
