"""ONNX into torch: every operator that is translated computes what onnxruntime computes, at any batch."""

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_spellings import NOT_ON_PROCESSORS, SPELLINGS, proto, spelled, weights
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.frontends.onnx.call import Call
from attnrewrite.frontends.onnx.compared import TOLERANCE, difference, explained
from attnrewrite.frontends.onnx.importer import example_inputs, import_graph
from attnrewrite.passes.roundings import roundings
from attnrewrite.patterns.fx.graph import FxGraph
from attnrewrite.patterns.matcher import scan
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.patterns.weights import same_weights

IMAGE = "float[B,6,9,9] x"
TOKENS = "float[B,10,16] x"
# name: (opset, input, body), the result is y
OPERATORS = {
    "whole numbers within bounds name rows": (
        17,
        TOKENS,
        """
            i = Cast<to=7>(x)
            none = Constant<value_int=0>()
            last = Constant<value_int=15>()
            c = Clip(i, none, last)
            y = Gather(wq, c)
        """,
    ),
    "rows at as many constant places as there are images": (
        17,
        TOKENS,
        """
            n = Shape<end=2>(x)
            none = Constant<value_int=0>()
            i = Expand(none, n)
            t = Gather(wq, i)
            y = Add(x, t)
        """,
    ),
    "arithmetic": (
        17,
        TOKENS,
        """
            a = Sub(x, bq)
            b = Div(a, root)
            c = Mul(b, x)
            two = Constant<value_float=2.0>()
            d = Pow(c, two)
            e = Sqrt(d)
            f = Neg(e)
            g = Exp(f)
            h = Abs(g)
            i = Min(h, x, a)
            j = Max(i, b)
            k = Reciprocal(root)
            y = Sum(j, k, x)
        """,
    ),
    "activations": (
        22,
        TOKENS,
        """
            a = Relu(x)
            b = Sigmoid(a)
            c = Tanh(b)
            d = Erf(c)
            e = Softplus(d)
            f = HardSigmoid<alpha=0.1>(e)
            g = HardSwish(f)
            h = Gelu(g)
            i = Gelu<approximate="tanh">(x)
            j = LeakyRelu<alpha=0.2>(x)
            k = Elu(x)
            l = Mish(x)
            m = PRelu(x, root)
            low = Constant<value_float=-0.5>()
            n = Clip(x, low)
            y = Sum(h, i, j, k, l, m, n)
        """,
    ),
    "comparison": (
        17,
        TOKENS,
        """
            a = Greater(x, root)
            b = Less(x, bq)
            c = Or(a, b)
            d = Not(c)
            e = Equal(d, a)
            f = Where(e, x, bq)
            g = Cast<to=1>(e)
            h = Floor(x)
            i = Ceil(x)
            j = Round(x)
            k = Sign(x)
            l = Mod<fmod=1>(x, root)
            y = Sum(f, g, h, i, j, k, l)
        """,
    ),
    "whole numbers divide towards zero": (
        17,
        TOKENS,
        "three = Constant<value_int=3>() f = Mul(x, wide) i = Cast<to=7>(f) d = Div(i, three) y = Cast<to=1>(d)",
    ),
    "normalisation": (
        17,
        IMAGE,
        """
            a = BatchNormalization(x, six, six, six, six_positive)
            b = InstanceNormalization(a, six, six)
            c = LayerNormalization<axis=-1>(b, nine, nine)
            d = LpNormalization<axis=1>(c)
            y = Softmax<axis=1>(d)
        """,
    ),
    "convolution": (
        17,
        IMAGE,
        """
            a = Conv<kernel_shape=[3, 3], pads=[1, 0, 0, 1]>(x, kernel)
            b = Conv<auto_pad="SAME_UPPER", strides=[2, 2]>(a, kernel, six)
            c = Conv<group=6, dilations=[2, 2], pads=[2, 2, 2, 2]>(b, depthwise)
            y = ConvTranspose<strides=[2, 2]>(c, kernel)
        """,
    ),
    "pooling": (
        17,
        IMAGE,
        """
            a = MaxPool<kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1]>(x)
            b = AveragePool<kernel_shape=[2, 2]>(a)
            c = AveragePool<kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1>(b)
            d = GlobalAveragePool(c)
            e = GlobalMaxPool(x)
            y = Add(d, e)
        """,
    ),
    "resize": (
        17,
        IMAGE,
        """
            a = Resize<mode="linear", coordinate_transformation_mode="half_pixel">(x, , twice)
            b = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(a, , twice)
            y = Resize<mode="cubic", cubic_coeff_a=-0.75>(b, , half)
        """,
    ),
    "resize, channels last": (
        17,
        IMAGE,
        """
            last = Transpose<perm=[0, 2, 3, 1]>(x)
            twofold = Constant<value_floats=[1.0, 2.0, 2.0, 1.0]>()
            a = Resize<mode="linear">(last, , twofold)
            y = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(a, , twofold)
        """,
    ),
    "reductions": (
        18,
        IMAGE,
        """
            last = Constant<value_ints=[-1]>()
            a = ReduceMean(x, last)
            b = ReduceSum(x, last)
            c = ReduceMax(x, last)
            d = ReduceL2(x, last)
            e = ReduceL1(x, last)
            f = ReduceSumSquare(x, last)
            g = ReduceLogSumExp(x, last)
            h = ReduceMin<keepdims=1>(x, last)
            i = ArgMax<axis=-1>(x)
            j = Cast<to=1>(i)
            y = Sum(a, b, c, d, e, f, g, h, j)
        """,
    ),
    "reductions with axes as attributes": (
        11,
        IMAGE,
        "a = ReduceMean<axes=[2, 3], keepdims=0>(x) y = Unsqueeze<axes=[1]>(a)",
    ),
    "slices": (
        17,
        IMAGE,
        """
            one = Constant<value_ints=[1]>()
            minus = Constant<value_ints=[-1]>()
            end = Constant<value_ints=[-9223372036854775807]>()
            axis = Constant<value_ints=[3]>()
            two = Constant<value_ints=[2]>()
            many = Constant<value_ints=[9223372036854775807]>()
            a = Slice(x, one, minus, axis)
            b = Slice(a, minus, end, axis, minus)
            c = Slice(b, one, many, axis, two)
            p, q, r = Split<axis=1>(c, thirds)
            y = Concat<axis=1>(r, p, q)
        """,
    ),
    "taking": (
        17,
        IMAGE,
        """
            one = Constant<value_int=-1>()
            several = Constant<value_ints=[2, 0, -1]>()
            grid = Reshape(several, column)
            a = Gather<axis=1>(x, one)
            b = Gather<axis=1>(x, several)
            c = Gather<axis=2>(b, grid)
            d = ReduceMax<axes=[1], keepdims=0>(c)
            e = ReduceSum<keepdims=1>(d)
            y = Add(a, e)
        """,
    ),
    "shapes": (
        17,
        IMAGE,
        """
            a0 = Flatten<axis=2>(x)
            cube = Constant<value_ints=[-1, 6, 81]>()
            a = Reshape(a0, cube)
            b = Transpose<perm=[0, 2, 1]>(a)
            size = Shape(b)
            c = Transpose(b)
            back = Transpose(c)
            flat = Constant<value_ints=[-1]>()
            d = Reshape(back, flat)
            y = Reshape(d, size)
        """,
    ),
    "spreading": (
        17,
        TOKENS,
        """
            size = Shape(x)
            a = Expand(bq, size)
            ones = Constant<value_ints=[1, 2, 1]>()
            b = Tile(a, ones)
            c = Tile(x, ones)
            z = ConstantOfShape(size)
            d = Tile(z, ones)
            e = Add(b, c)
            y = Add(d, e)
        """,
    ),
    "tiles over the batch": (
        17,
        TOKENS,
        """
            size = Shape(x)
            zero = Constant<value_ints=[0]>()
            b = Gather<axis=0>(size, zero)
            rest = Constant<value_ints=[1, 1]>()
            r = Concat<axis=0>(b, rest)
            row = Reshape(bq, cube)
            t = Tile(row, r)
            y = Add(x, t)
        """,
    ),
    "padding": (
        13,
        IMAGE,
        """
            p = Constant<value_ints=[0, 0, 1, 2, 0, 0, 0, 1]>()
            v = Constant<value_float=1.5>()
            a = Pad(x, p, v)
            b = Pad<mode="reflect">(a, p)
            y = Pad<mode="edge">(b, p)
        """,
    ),
    "blocks of pixels": (
        17,
        "float[B,8,4,4] x",
        """
            a = DepthToSpace<blocksize=2>(x)
            b = SpaceToDepth<blocksize=2>(a)
            y = DepthToSpace<blocksize=2, mode="CRD">(b)
        """,
    ),
    "products": (
        17,
        "float[B,16] x",
        """
            a = Gemm<transB=1>(x, wq, bq)
            b = Gemm<alpha=0.5, beta=2.0>(a, wk, bk)
            c = MatMul(b, wv)
            d = Einsum<equation="bi,bj->bij">(c, a)
            y = ReduceSum<keepdims=0>(d)
        """,
    ),
    "scattering": (
        17,
        IMAGE,
        "size = Shape(x) i = Expand(places, size) y = ScatterElements<axis=1>(x, i, x)",
    ),
    "sampled at places": (
        16,
        IMAGE,
        """
            a = Transpose<perm=[0,2,3,1]>(x)
            starts = Constant<value_ints=[0]>()
            ends = Constant<value_ints=[2]>()
            axes = Constant<value_ints=[3]>()
            grid = Slice(a, starts, ends, axes)
            b = GridSample(x, grid)
            c = GridSample<mode="nearest", padding_mode="border">(x, grid)
            d = GridSample<mode="bicubic", padding_mode="reflection", align_corners=1>(x, grid)
            y = Sum(b, c, d)
        """,
    ),
    "sampled at places of a volume": (
        20,
        "float[B,3,4,5,6] x",
        """
            grid = Transpose<perm=[0,2,3,4,1]>(x)
            a = GridSample<mode="linear">(x, grid)
            b = GridSample<mode="nearest", align_corners=1>(x, grid)
            y = Mean(a, b)
        """,
    ),
    "trigonometric": (
        17,
        IMAGE,
        """
            a = Atan(x) b = Sinh(a) c = Cosh(b) d = Asinh(c) e = Tanh(d) f = Asin(e) g = Acos(e) h = Atanh(e)
            i = Tan(a) one = Constant<value_float=1.0>() j = Abs(x) k = Add(j, one) l = Acosh(k)
            y = Mean(f, g, h, i, l)
        """,
    ),
    "rectifiers": (
        17,
        IMAGE,
        """
            a = Selu(x) b = Selu<alpha=2.0, gamma=0.5>(x)
            c = Celu<alpha=0.7>(x) d = ThresholdedRelu(x)
            y = Sum(a, b, c, d)
        """,
    ),
    "products and logarithms of sums": (
        13,
        IMAGE,
        """
            a = ReduceProd<axes=[1,3], keepdims=0>(x) p = Abs(x) b = ReduceLogSum<axes=[1,-1], keepdims=0>(p)
            y = Add(a, b)
        """,
    ),
    "one at a place": (
        17,
        TOKENS,
        """
            four = Constant<value_int=4>() a = Cast<to=7>(x) i = Mod<fmod=1>(a, four)
            pair = Constant<value_floats=[-1.0, 2.5]>() b = OneHot<axis=1>(i, four, pair) y = CastLike(b, x)
        """,
    ),
    "bits": (
        18,
        TOKENS,
        """
            a = Cast<to=7>(x) three = Constant<value_int=3>() b = BitwiseAnd(a, three) c = BitwiseOr(a, three)
            d = BitwiseXor(b, c) e = BitwiseNot(d) y = Cast<to=1>(e)
        """,
    ),
    "triangles and sums": (17, IMAGE, "a = Trilu<upper=0>(x) one = Constant<value_int=2>() y = CumSum(a, one)"),
    "looked up": (
        17,
        TOKENS,
        """
            four = Constant<value_int=4>()
            a = Abs(x)
            b = Cast<to=7>(a)
            c = Mod(b, four)
            d = Gather<axis=1>(wq, c)
            e = Gather(bq, c)
            axes = Constant<value_ints=[0]>()
            f = Unsqueeze(e, axes)
            y = Add(d, f)
        """,
    ),
    "products that move their batch": (
        17,
        TOKENS,
        """
            t = Transpose<perm=[1, 0, 2]>(x)
            s = com.microsoft.FusedMatMul<alpha=0.25, transBatchA=1, transBatchB=1, transB=1>(t, t)
            y = com.microsoft.FusedMatMul<transBatchA=1, transA=1>(t, s)
        """,
    ),
    "fused": (17, TOKENS, "y, m, i = com.microsoft.SkipLayerNormalization(x, x, bq, bk)"),
    "fused, alone": (17, TOKENS, "y = com.microsoft.SkipLayerNormalization(x, x, bq, bk)"),
    "fused activations": (
        17,
        TOKENS,
        """
            a = com.microsoft.BiasGelu(x, bq)
            b = com.microsoft.QuickGelu(a)
            c = com.microsoft.QuickGelu<alpha=1.5>(b)
            y = com.microsoft.Gelu(c)
        """,
    ),
    "fused convolution": (
        17,
        IMAGE,
        """
            w = Constant<value=float[2,6,1,1]{1,2,3,4,5,6,-1,-2,-3,-4,-5,-6}>()
            a = com.microsoft.FusedConv<activation="Relu">(x, w)
            b = com.microsoft.FusedConv<activation="LeakyRelu", activation_params=[0.2]>(x, w)
            y = Add(a, b)
        """,
    ),
    "fused product": (
        17,
        "float[B,16] x",
        """
            a = com.microsoft.FusedGemm<activation="Tanh", transB=1>(x, wq, bq)
            y = com.microsoft.FusedGemm<activation="Relu", alpha=0.5>(a, wk)
        """,
    ),
    "written into a box, and elsewhere": (
        17,
        TOKENS,
        """
            t = Transpose<perm=[1, 2, 0]>(x)
            box = Constant<value=int64[2,3,2]{3,5,3,6,3,7,4,5,4,6,4,7}>()
            others = Constant<value=int64[2,3,2]{3,5,3,6,3,7,4,5,4,6,5,7}>()
            from = Constant<value_ints=[0, 0]>()
            to = Constant<value_ints=[2, 3]>()
            part = Slice(t, from, to)
            a = ScatterND(t, box, part)
            b = ScatterND(t, others, part)
            y = Add(a, b)
        """,
    ),
    "fused, and its sum": (
        17,
        TOKENS,
        """
            n, m, i, s = com.microsoft.SkipLayerNormalization(x, x, bq, bk)
            o, m2, i2, t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(n, s, bq, bk, bv)
            y = Mul(o, t)
        """,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_computes_what_onnxruntime_computes(name: str) -> None:
    opset, inputs, body = OPERATORS[name]
    model = ir.serde.deserialize_model(proto(body, opset, inputs, "float y"))
    model.graph.outputs[0].shape = None
    module, (example,) = import_graph(OnnxGraph(model))
    assert difference(model, module, (torch.cat([example, -example, example]),)) <= TOLERANCE


@pytest.mark.parametrize(
    ("first", "second", "rolled"),
    [
        ("3, 10, 1", "0, 3, 1", True),
        ("3, 9223372036854775807, 1", "0, 3, 1", True),
        ("-3, 10, 1", "0, -3, 1", True),
        ("4, 10, 1", "0, 3, 1", False),
        ("0, 3, 1", "3, 10, 1", False),
        ("3, 10, 2", "0, 3, 2", False),
        ("3, 9, 1", "0, 4, 1", False),
        ("-12, 10, 1", "0, -12, 1", False),
    ],
)
def test_parts_that_change_places_are_a_roll(first: str, second: str, rolled: bool) -> None:
    """As exporters write the shifted windows of a Swin."""
    parts = (
        f"s{n} = Constant<value_ints=[{start}]>() e{n} = Constant<value_ints=[{end}]>() "
        f"axis{n} = Constant<value_ints=[1]>() t{n} = Constant<value_ints=[{step}]>() "
        f"p{n} = Slice(x, s{n}, e{n}, axis{n}, t{n}) "
        for n, (start, end, step) in enumerate(part.split(", ") for part in (first, second))
    )
    model = ir.serde.deserialize_model(proto("".join(parts) + "y = Concat<axis=1>(p0, p1)", 17, TOKENS, "float y"))
    model.graph.outputs[0].shape = None
    module, (example,) = import_graph(OnnxGraph(model))
    assert difference(model, module, (torch.cat([example, -example]),)) == 0
    assert any(node.target is torch.roll for node in module.graph.nodes) is rolled


def test_whole_numbers_of_an_example_name_rows_that_a_table_has() -> None:
    body = "axes = Constant<value_ints=[1]>() a = Unsqueeze(x, axes) i = Cast<to=6>(a) y = Gather(wq, i)"
    module, (example,) = import_graph(
        OnnxGraph(ir.serde.deserialize_model(proto(body, 17, "int64[B,99] x", "float y")))
    )
    assert (example.dtype, int(example.min()), int(example.max())) == (torch.int64, 0, 15)
    assert module(example).shape == (2, 1, 99, 16)


def test_whole_numbers_that_are_a_mask_leave_every_query_an_answer() -> None:
    """Of 0 to 127, all but 1 would drop a key, or make its score infinite."""
    body = """
        f = Cast<to=1>(mask) one = Constant<value_float=1.0>() g = Sub(one, f)
        low = Constant<value_float=-3.4028235e38>() b = Mul(g, low) axes = Constant<value_ints=[1]>()
        u = Unsqueeze(b, axes) t = Transpose<perm=[0,2,1]>(x) s = MatMul(x, t) m = Add(s, u) p = Softmax(m)
        y = MatMul(p, x)
    """
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, f"{TOKENS}, int64[B,10] mask", "float[B,10,16] y")))
    _, (_, mask) = import_graph(graph)
    assert mask.unique().tolist() == [0, 1]


def test_whole_numbers_of_which_truths_are_read_are_drawn_as_such() -> None:
    body = """
        u = Identity(mask) f = Cast<to=9>(u) g = Cast<to=1>(f) axes = Constant<value_ints=[2]>()
        h = Unsqueeze(g, axes) y = Mul(x, h)
    """
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, f"{TOKENS}, int64[B,10] mask", "float[B,10,16] y")))
    _, mask = example_inputs(graph)
    assert mask.unique().tolist() == [0, 1]


def test_no_row_of_truths_of_an_example_is_all_true_or_all_false() -> None:
    body = "f = Cast<to=1>(mask) g = ReduceMax<axes=[-1]>(f) y = Mul(x, g)"
    model = proto(body, 17, f"{TOKENS}, bool[B,10,2] mask, bool[B,1] one", "float[B,10,16] y")
    _, mask, one = example_inputs(OnnxGraph(ir.serde.deserialize_model(model)))
    assert bool((mask.any(-1) & ~mask.all(-1)).all())
    assert (one.dtype, tuple(one.shape)) == (torch.bool, (2, 1))


class Answer(nn.Module):
    def __init__(self, *rows: float) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.rows.expand_as(x)


@pytest.mark.parametrize(
    ("answer", "same"),
    [
        ((math.nan, -math.inf, 0.0, 2.0), True),
        ((math.nan, -math.inf, 0.0, 2.1), False),
        ((math.nan, math.inf, 0.0, 2.0), False),
        ((0.0, -math.inf, 0.0, 2.0), False),
        ((math.nan, -math.inf, math.nan, 2.0), False),
    ],
)
def test_what_is_no_number_in_both_is_no_difference(answer: tuple[float, ...], same: bool) -> None:
    """A file may answer NaN for a query that sees no key, and minus infinity for a class that is left out."""
    body = "zero = Constant<value_float=0.0>() w = Constant<value_floats=[0.0, -1.0, 1.0, 1.0]>() z = Mul(x, zero) "
    body += "one = Constant<value_floats=[0.0, 0.0, 1.0, 1.0]>() a = Add(z, w) b = Div(a, one) "
    model = ir.serde.deserialize_model(
        proto(
            body + "c = Constant<value_floats=[0.0, 0.0, 1.0, -1.0]>() y = Sub(b, c)",
            17,
            "float[B,4] x",
            "float[B,4] y",
        )
    )
    assert (difference(model, Answer(*answer), (torch.randn(3, 4),)) <= TOLERANCE) is same


def test_where_nothing_is_a_number_nothing_is_known() -> None:
    model = proto("z = Sub(x, x) y = Div(z, z)", 17, "float[B,4] x", "float[B,4] y")
    assert difference(ir.serde.deserialize_model(model), Answer(math.nan), (torch.randn(3, 4),)) == math.inf


@pytest.mark.parametrize("name", [name for name in SPELLINGS if name not in NOT_ON_PROCESSORS])
def test_an_imported_attention_is_the_same_site(name: str) -> None:
    model = spelled(name)
    module, inputs = import_graph(OnnxGraph(model))
    (mine,) = scan(FxGraph(capture("imported", module, inputs).module), "imported").sites
    (wanted,) = scan_onnx(OnnxGraph(model), "model").sites
    assert same_weights(mine.fingerprint, wanted.fingerprint)
    assert (mine.heads, mine.n_queries, mine.scale) == (wanted.heads, wanted.n_queries, pytest.approx(wanted.scale))


def test_a_model_in_half_precision_is_held_to_what_it_means() -> None:
    """Its rounding is ten times what is allowed. The converter puts its casts behind what reads them."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    half = float16.convert_float_to_float16(ir.serde.serialize_model(spelled("opset 11")), keep_io_types=True)
    model = ir.serde.deserialize_model(half)
    module, inputs = import_graph(OnnxGraph(model))
    assert len(scan_onnx(OnnxGraph(model), "model").sites) == 1
    assert any(parameter.dtype == torch.float16 for parameter in module.parameters())
    assert difference(model, module, inputs) <= TOLERANCE
    with torch.no_grad():
        next(each for each in module.parameters() if each.dim() == 2).mul_(1.01)
    assert difference(model, module, inputs) > TOLERANCE


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "n, m = com.microsoft.SkipLayerNormalization(x, x, bq, bk) y = Add(n, m)",
            r"SkipLayerNormalization \(node 'node0', opset 17\) cannot be imported .*: its output 'm' is read",
        ),
        (
            "n, m = LayerNormalization(x, bq, bk) y = Add(n, m)",
            r"LayerNormalization \(node 'node0', opset 17\) cannot be imported .*: its output 'm' is read",
        ),
        (
            "i, s, z = DynamicQuantizeLinear(x) t = Transpose<perm=[0,2,1]>(i) m = MatMulInteger(i, t) y = Abs(m)",
            r"MatMulInteger \(node 'node2', opset 17\) cannot be imported .*: .* give the model before quantization",
        ),
        (
            "y = com.microsoft.nchwc.ReorderInput(x)",
            r"ReorderInput .* cannot be imported .*: onnxruntime laid it out for one processor; .* ORT_ENABLE_EXTENDED",
        ),
        (
            "r = RandomUniformLike(x) y = Add(x, r)",
            r"RandomUniformLike .* it draws random numbers; export the model with",
        ),
        ("y = Hardmax(x)", r"Hardmax \(node 'node0', opset 17\) cannot be imported .*: no translation is known"),
        ("y = Softmax<axis=9223372036854775807>(x)", r"Softmax .* cannot be imported .*: .* of 3 axes has no axis 9"),
        ("z = Sub(x, x) y = Div(z, z)", "answers random inputs with NaN or infinity alone"),
        ("s = Shape(x) f = Cast<to=1>(s) g = ReduceSum<keepdims=0>(f) y = Mul(x, g)", "the batch size as a number"),
        (
            """m = ReduceMax<keepdims=0>(x) i = Cast<to=7>(m) zero = Constant<value_int=0>()
            one = Constant<value_int=1>() r = Range(zero, i, one) y = Cast<to=1>(r)""",
            "the size of its result depends on the data",
        ),
    ],
)
def test_what_cannot_be_imported_is_named(body: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        import_graph(OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float y"))))


def test_what_holds_the_batch_that_it_was_read_with_is_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    body = OPERATORS["rows at as many constant places as there are images"][2]
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float y")))
    monkeypatch.setattr(Call, "is_settled", lambda call, place: graph.is_constant(call.name(place)))
    with pytest.raises(CheckFailedError, match="does not take a batch of 3"):
        import_graph(graph)


@pytest.mark.parametrize(
    ("errors", "taken"), [([3e-4, 2e-5, 2e-5], True), ([3e-4, 2e-5, 3e-4], False), ([0.5, 2e-5, 2e-5], False)]
)
def test_little_differences_are_looked_at_on_other_inputs(
    errors: list[float], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, found = OnnxGraph(spelled("plain")), iter([*errors, *[0.0] * 3])
    monkeypatch.setattr("attnrewrite.frontends.onnx.compared.difference", lambda *_: next(found))
    with nullcontext() if taken else pytest.raises(CheckFailedError, match=f"by {errors[0]:.2e}"):
        import_graph(graph)


@pytest.mark.parametrize(
    ("body", "lost"),
    [
        ("big = Constant<value_float=2e3>() f = Add(x, big) m = ReduceMean<axes=[2]>(f) y = Sub(m, big)", True),
        ("y = ReduceMean<axes=[2]>(x)", False),
    ],
)
def test_what_float32_loses_in_the_module_explains_a_difference(body: str, lost: bool) -> None:
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float y")))
    module, inputs = import_graph(graph)
    allowed = explained(graph.source, module, inputs)
    assert difference(graph.source, module, inputs) <= allowed
    assert (allowed > TOLERANCE) is lost


@pytest.mark.parametrize(("factor", "apart"), [(0.0, 0.0), (1.0, math.inf)])
def test_a_rounding_that_the_file_lacks_matters_where_the_answer_depends_on_it(factor: float, apart: float) -> None:
    body = "s = Constant<value_float=0.1>() g = Neg(x) i = QuantizeLinear(g, s) d = DequantizeLinear(i, s) "
    body += f"f = Constant<value_float={factor}>() z = Mul(d, f) y = Add(x, z)"
    module, inputs = import_graph(OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float y"))))
    other = ir.serde.deserialize_model(proto("y = Identity(x)", 17, TOKENS, "float y"))
    assert difference(other, module, inputs) == apart


def test_the_largest_of_some_numbers_may_be_rounded() -> None:
    """It is what the rounding is given, not a step towards a scale of the moment."""
    body = "s = Constant<value_float=0.1>() m = ReduceMax<axes=[1]>(x) i = QuantizeLinear(m, s) "
    module, _ = import_graph(
        OnnxGraph(ir.serde.deserialize_model(proto(f"{body} y = DequantizeLinear(i, s)", 17, TOKENS, "float y")))
    )
    (given,) = roundings(module).values()
    assert given.target is torch.amax


def test_what_is_compared_in_float32_stays_in_half_precision_itself() -> None:
    graph = OnnxGraph(ir.serde.deserialize_model(proto("y = Relu(x)", 17, "float16[B,4] x", "float16[B,4] y")))
    import_graph(graph)
    assert [value.dtype for value in graph.source.graph.inputs] == [ir.DataType.FLOAT16]


def test_what_is_computed_of_weights_in_half_precision_is_compared_as_it_is_stored() -> None:
    body = "w = Cast<to=10>(wq) t = Tanh(w) u = Mul(t, t) h = Cast<to=10>(x) m = MatMul(h, u) y = Cast<to=1>(m)"
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float[B,10,16] y")))
    module, inputs = import_graph(graph)
    assert difference(graph.source, module, inputs) < 1e-6
    (stored,) = (buffer for buffer in module.buffers() if buffer.dtype == torch.float16)
    exact = torch.from_numpy(weights()["wq"]).half().double().tanh() ** 2
    assert float((stored.double() - exact).abs().max() / exact.max()) > 1e-4  # which is rounding, and no difference


@pytest.mark.parametrize("kind", [1, 10])
def test_a_choice_among_equal_numbers_is_followed_and_a_wrong_one_seen(kind: int) -> None:
    """In float32 and in float16."""
    body = f"h = Cast<to={kind}>(x) r = Round(h) k = Constant<value_ints=[3]>() v, i = TopK(r, k)"
    body += " g = GatherElements<axis=2>(h, i) y = Cast<to=1>(g)"
    graph = OnnxGraph(ir.serde.deserialize_model(proto(body, 17, TOKENS, "float[B,10,3] y")))
    module, inputs = import_graph(graph)
    assert difference(graph.source, module, inputs) <= TOLERANCE
    (choice,) = (node for node in module.graph.nodes if node.target is torch.topk)
    choice.args = (*choice.args[:3], False)
    module.recompile()
    assert difference(graph.source, module, inputs) > 0.1


def test_a_third_party_file_is_imported(shared: Path) -> None:
    path = shared / "data/cct_xs_plate_ocr_onnx/cct_xs_v1_global.onnx"
    if not path.is_file():
        pytest.skip(f"needs {path.name}")
    module, (example,) = import_graph(OnnxGraph(ir.load(path)))
    assert (example.dtype, tuple(example.shape)) == (torch.uint8, (2, 64, 128, 3))
    assert difference(ir.load(path), module, (torch.cat([example, example.flip(1)]),)) <= TOLERANCE
    np.testing.assert_allclose(module(example).sum(-1).detach(), 1, rtol=1e-5)


def test_a_weight_that_is_no_number_is_named() -> None:
    model = spelled("plain")
    damaged = model.graph.initializers["bq"]
    assert damaged.const_value is not None
    damaged.const_value = ir.tensor(np.full_like(damaged.const_value.numpy(), np.nan), name="bq")
    with pytest.raises(InputError, match="weight bq holds NaN"):
        import_graph(OnnxGraph(model))
