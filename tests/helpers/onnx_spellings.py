"""One attention, [B, 10, 16] with 2 heads of 8 channels, as many ways as ONNX files spell it."""

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper
from onnx.parser import parse_model

TOKENS, WIDTH, HEADS, HEAD = 10, 16, 2, 8

_PROJECTED = """
  q1 = MatMul(x, wq)
  q2 = Add(q1, bq)
  k1 = MatMul(x, wk)
  k2 = Add(bk, k1)
  v1 = MatMul(x, wv)
  v2 = Add(v1, bv)
"""
_SPLIT = """
  heads = Constant<value_ints=[0, 0, 2, 8]>()
  q3 = Reshape(q2, heads)
  k3 = Reshape(k2, heads)
  v3 = Reshape(v2, heads)
  q = Transpose<perm=[0, 2, 1, 3]>(q3)
  v = Transpose<perm=[0, 2, 1, 3]>(v3)
"""
_JOINED = """
  o1 = Transpose<perm=[0, 2, 1, 3]>(o)
  joined = Constant<value_ints=[0, 0, 16]>()
  o2 = Reshape(o1, joined)
"""
_OUT = """
  o3 = MatMul(o2, wo)
  y = Add(o3, bo)
"""
_PRODUCTS = """
  kt = Transpose<perm=[0, 2, 3, 1]>(k3)
  s1 = MatMul(q, kt)
  scale = Constant<value_float=0.35355338>()
  s2 = Mul(s1, scale)
  p = Softmax<axis=-1>(s2)
  o = MatMul(p, v)
"""

# name: (opset of the standard operators, the graph's body)
SPELLINGS = {
    "plain": (17, _PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT),
    "opset 11": (
        11,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT)
        .replace("heads = Constant<value_ints=[0, 0, 2, 8]>()", "heads = Identity(heads0)")
        .replace("joined = Constant<value_ints=[0, 0, 16]>()", "joined = Identity(joined0)")
        .replace("scale = Constant<value_float=0.35355338>()", "scale = Identity(scale0)")
        .replace("axis=-1", "axis=3"),
    ),
    "softmax over Flatten, opset 11": (
        11,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT)
        .replace("heads = Constant<value_ints=[0, 0, 2, 8]>()", "heads = Identity(heads0)")
        .replace("joined = Constant<value_ints=[0, 0, 16]>()", "joined = Identity(joined0)")
        .replace("scale = Constant<value_float=0.35355338>()", "scale = Identity(scale0)")
        .replace(
            "p = Softmax<axis=-1>(s2)",
            "s3 = Unsqueeze<axes=[4]>(s2)\n p1 = Softmax<axis=3>(s3)\n p = Squeeze<axes=[4]>(p1)",
        ),
    ),
    "softmax of its logarithm": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)", "l = LogSoftmax<axis=-1>(s2)\n  p = Exp(l)"
        ),
    ),
    "softmax by hand": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)",
            """m = ReduceMax<axes=[-1], keepdims=1>(s2)
  last = Constant<value_ints=[-1]>()
  d = Sub(s2, m)
  e = Exp(d)
  t = ReduceSum<keepdims=1>(e, last)
  p = Div(e, t)""",
        ),
    ),
    "powers of two, over their sum": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)",
            """two = Constant<value_float=2.0>()
  bits = Constant<value_float=1.44269504>()
  d = Mul(s2, bits)
  e = Pow(two, d)
  last = Constant<value_ints=[-1]>()
  t = ReduceSum<keepdims=1>(e, last)
  p = Div(e, t)""",
        ),
    ),
    "softmax by hand, times the inverse of the sum": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)",
            """last = Constant<value_ints=[-1]>()
  e = Exp(s2)
  t = ReduceSum<keepdims=1>(e, last)
  i = Reciprocal(t)
  p = Mul(e, i)""",
        ),
    ),
    "softmax by hand, times one over the sum": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)",
            """last = Constant<value_ints=[-1]>()
  one = Constant<value_float=1.0>()
  e = Exp(s2)
  t = ReduceSum<keepdims=1>(e, last)
  i = Div(one, t)
  p = Mul(i, e)""",
        ),
    ),
    "scores less their logsumexp": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)",
            """m = ReduceLogSumExp<axes=[-1], keepdims=1>(s2)
  d = Sub(s2, m)
  p = Exp(d)""",
        ),
    ),
    "softmax by hand, divided after the values": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "p = Softmax<axis=-1>(s2)\n  o = MatMul(p, v)",
            """last = Constant<value_ints=[-1]>()
  e = Exp(s2)
  mixed = MatMul(e, v)
  t = ReduceSum<keepdims=0>(e, last)
  column = Unsqueeze(t, last)
  o = Div(mixed, column)""",
        ),
    ),
    "sizes computed from the input": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "heads = Constant<value_ints=[0, 0, 2, 8]>()",
            """size = Shape(x)
  zero = Constant<value_ints=[0]>()
  batch = Gather<axis=0>(size, zero)
  rest = Constant<value_ints=[10, 2, 8]>()
  heads = Concat<axis=0>(batch, rest)""",
        ),
    ),
    "bias after the heads are split": (
        15,
        """
  heads = Constant<value_ints=[0, 0, 2, 8]>()
  q1 = MatMul(x, wq)
  q2 = Reshape(q1, heads)
  q3 = Add(q2, bq_heads)
  k1 = MatMul(x, wk)
  k2 = Reshape(k1, heads)
  k3 = Add(k2, bk_heads)
  v1 = MatMul(x, wv)
  v2 = Reshape(v1, heads)
  v3 = Add(v2, bv_heads)
  q = Transpose<perm=[0, 2, 1, 3]>(q3)
  v = Transpose<perm=[0, 2, 1, 3]>(v3)
"""
        + _PRODUCTS + _JOINED + _OUT,
    ),
    "einsum, weights of three axes": (
        17,
        """
  q1 = Einsum<equation="abc,cde->abde">(x, wq_heads)
  q = Add(q1, bq_heads)
  k1 = Einsum<equation="abc,cde->abde">(x, wk_heads)
  k = Add(k1, bk_heads)
  v1 = Einsum<equation="abc,cde->abde">(x, wv_heads)
  v = Add(v1, bv_heads)
  s1 = Einsum<equation="aecd,abcd->acbe">(k, q)
  s2 = Div(s1, root)
  p = Softmax(s2)
  o = Einsum<equation="acbe,aecd->abcd">(p, v)
  o3 = Einsum<equation="abcd,cde->abe">(o, wo_heads)
  y = Add(o3, bo)
""",
    ),
    "weights behind Cast and Transpose": (
        17,
        "\n  wq = Transpose<perm=[1, 0]>(wq_turned)\n  wk = Cast<to=1>(wk_double)\n"
        + (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT),
    ),
    "one packed projection": (
        17,
        """
  a1 = MatMul(x, w_packed)
  a2 = Add(a1, b_packed)
  heads = Constant<value_ints=[0, 0, 3, 2, 8]>()
  a3 = Reshape(a2, heads)
  a4 = Transpose<perm=[2, 0, 3, 1, 4]>(a3)
  q0, k0, v0 = Split<axis=0>(a4, ones)
  first = Constant<value_ints=[0]>()
  q = Squeeze(q0, first)
  k3 = Squeeze(k0, first)
  v = Squeeze(v0, first)
"""
        + _PRODUCTS.replace("[0, 2, 3, 1]", "[0, 1, 3, 2]") + _JOINED + _OUT,
    ),
    "Attention on three axes": (
        23,
        _PROJECTED + "\n  o2 = Attention<q_num_heads=2, kv_num_heads=2>(q2, k2, v2)\n" + _OUT,
    ),
    "Attention on four axes": (
        23,
        _PROJECTED + _SPLIT + """
  k = Transpose<perm=[0, 2, 1, 3]>(k3)
  o = Attention<scale=0.35355338>(q, k, v)
""" + _JOINED + _OUT,
    ),
    "MultiHeadAttention": (
        17,
        _PROJECTED + "\n  o2 = com.microsoft.MultiHeadAttention<num_heads=2>(q2, k2, v2)\n" + _OUT,
    ),
    "MultiHeadAttention with its own bias": (
        17,
        """
  q1 = MatMul(x, wq)
  k1 = MatMul(x, wk)
  v1 = MatMul(x, wv)
  o2 = com.microsoft.MultiHeadAttention<num_heads=2>(q1, k1, v1, b_packed)
"""
        + _OUT,
    ),
    "MultiHeadAttention, packed": (
        17,
        """
  a1 = MatMul(x, w_interleaved)
  a2 = Add(a1, b_interleaved)
  packed = Constant<value_ints=[0, 0, 2, 3, 8]>()
  a3 = Reshape(a2, packed)
  o2 = com.microsoft.MultiHeadAttention<num_heads=2>(a3)
"""
        + _OUT,
    ),
    "com.microsoft Attention": (
        17,
        "\n  o2 = com.microsoft.Attention<num_heads=2>(x, w_packed, b_packed)\n" + _OUT,
    ),
    "FusedMatMul": (
        17,
        _PROJECTED + _SPLIT + """
  k = Transpose<perm=[0, 2, 1, 3]>(k3)
  s2 = com.microsoft.FusedMatMul<alpha=0.35355338, transB=1>(q, k)
  p = Softmax(s2)
  o = MatMul(p, v)
""" + _JOINED + _OUT,
    ),
    "FusedMatMul that moves the batch": (
        17,
        _PROJECTED + _SPLIT + """
  q4 = Transpose<perm=[1, 0, 2, 3]>(q3)
  k4 = Transpose<perm=[1, 0, 2, 3]>(k3)
  v4 = Transpose<perm=[1, 0, 2, 3]>(v3)
  s2 = com.microsoft.FusedMatMul<alpha=0.35355338, transBatchA=1, transBatchB=1, transB=1>(q4, k4)
  p = Softmax(s2)
  o = com.microsoft.FusedMatMul<transBatchB=1>(p, v4)
""" + _JOINED + _OUT,
    ),
    "a branch that is always taken": (
        17,
        (_PROJECTED + _SPLIT + _PRODUCTS + _JOINED + _OUT).replace(
            "  p = Softmax<axis=-1>(s2)",
            """
  rank = Shape(x)
  three = Size(rank)
  wanted = Constant<value_int=3>()
  always = Equal(three, wanted)
  p = If (always) <
    then_branch = yes () => (inner) { inner = Softmax<axis=-1>(s2) },
    else_branch = no () => (same) { same = Identity(s2) }
  >
""",
        ),
    ),
}  # fmt: skip
_FLAGS = "one = Constant<value_int=1>()\n  yes = Cast<to=9>(one)\n  half = Constant<value_float=0.5>()\n  "
_LOWEST = "low = Constant<value_float=-10000.0>()\n  "
# The last six keys' scores, and what torch's exporter makes of `s2[..., 4:] = more`: positions along the first axis.
_PART = """from = Constant<value_ints=[4]>()
  to = Constant<value_ints=[10]>()
  at = Constant<value_ints=[3]>()
  part = Slice(s2, from, to, at)
  """
_WRITTEN = """
  first = Transpose<perm=[3, 1, 2, 0]>(s2)
  updates = Transpose<perm=[3, 1, 2, 0]>(more)
  written = ScatterND(first, last_six, updates)
  s3 = Transpose<perm=[3, 1, 2, 0]>(written)"""
_AS_PICTURES = """apart = Constant<value_ints=[0, 2, 10, 2, 3]>()
  pictures = Reshape(part, apart)
  rows = Constant<value_floats=[0.5, -0.7]>()
  behind = Constant<value_ints=[1]>()
  table = Unsqueeze(rows, behind)
  by_row = Add(pictures, table)
  columns = Constant<value_floats=[0.1, -0.4, 0.9]>()
  by_column = Add(columns, by_row)
  together = Constant<value_ints=[0, 2, 10, 6]>()
  more = Reshape(by_column, together)"""
_OF_QUERIES_AND_KEYS = """from = Constant<value_ints=[4]>()
  to = Constant<value_ints=[10]>()
  of_queries = Constant<value_ints=[2]>()
  of_keys = Constant<value_ints=[3]>()
  rows = Slice(s2, from, to, of_queries)
  part = Slice(rows, from, to, of_keys)
  more = Add(part, six)
  keys_first = Transpose<perm=[3, 1, 2, 0]>(rows)
  added = Transpose<perm=[3, 1, 2, 0]>(more)
  inner = ScatterND(keys_first, last_six, added)
  turned_back = Transpose<perm=[3, 1, 2, 0]>(inner)
  queries_first = Transpose<perm=[2, 1, 0, 3]>(s2)
  updates = Transpose<perm=[2, 1, 0, 3]>(turned_back)
  outer = ScatterND(queries_first, last_six, updates)
  s3 = Transpose<perm=[2, 1, 0, 3]>(outer)"""
# name: (what becomes of it, as in odd_spellings, and its nodes between the scaled scores s2 and the softmax of s3)
ODD_SCORES = {
    "whole numbers": ("no core", "i = Cast<to=6>(s2)\n  s3 = Cast<to=1>(i)"),
    "truth values": ("no core", "i = Cast<to=9>(s2)\n  s3 = Cast<to=1>(i)"),
    "another precision and back": ("right", "i = Cast<to=11>(s2)\n  s3 = Cast<to=1>(i)"),
    "dropped": ("no core", _FLAGS + "s3 = Dropout(s2, half, yes)"),
    "dropped in inference": ("right", "s3 = Dropout(s2)"),
    "rounded down": ("no core", "s3 = Floor(s2)"),
    "clipped": ("no core", _LOWEST + "s3 = Clip(s2, low)"),
    "bounded": ("no core", "wide0 = Identity(wide)\n  s3 = Min(s2, wide0)"),
    "maximum of each query": ("right", "m = ReduceMax<axes=[-1], keepdims=1>(s2)\n  s3 = Sub(s2, m)"),
    "maximum of each key": ("right", "m = ReduceMax<axes=[-2], keepdims=1>(s2)\n  s3 = Sub(s2, m)"),
    "times a mask": ("no core", "f = Cast<to=1>(mask)\n  s3 = Mul(s2, f)"),
    "filled": ("right", _LOWEST + "s3 = Where(mask, s2, low)"),
    "filled, then scaled": ("no core", _LOWEST + "w = Where(mask, s2, low)\n  small = Constant<value_float=0.001>()\n"
                            "  s3 = Mul(w, small)"),
    "filled, then biased": ("no core", _LOWEST + "w = Where(mask, s2, low)\n  f = Cast<to=1>(mask)\n  s3 = Add(w, f)"),
    "filled with zero": ("no core", "zero = Constant<value_float=0.0>()\n  s3 = Where(mask, s2, zero)"),
    "keys rolled": ("no core", "sizes = Constant<value_ints=[9, 1]>()\n  a, b = Split<axis=3>(s2, sizes)\n"
                    "  s3 = Concat<axis=3>(b, a)"),
    "upper triangle of zeros": ("no core", "s3 = Trilu<upper=0>(s2)"),
    "added to a part": ("right", _PART + "more = Add(part, six)" + _WRITTEN),
    "added to a part as pictures": ("right", _PART + _AS_PICTURES + _WRITTEN),
    "added to a part of a part": ("right", _OF_QUERIES_AND_KEYS),
    "a part times numbers": ("no core", _PART + "more = Mul(part, six)" + _WRITTEN),
    "added to a part of other keys": ("no core", (_PART + "more = Add(part, six)" + _WRITTEN)
                                      .replace("value_ints=[4]", "value_ints=[3]").replace("=[10]", "=[9]")),
    "added to a part that others read": ("no core", _PART + "more = Add(part, six)" + _WRITTEN.replace("s3", "s4") +
                                         "\n  m = ReduceMax<axes=[-1], keepdims=1>(more)\n  s3 = Sub(s4, m)"),
}  # fmt: skip
NOT_ON_PROCESSORS = ("MultiHeadAttention, packed",)  # onnxruntime has it for other devices alone


def weights() -> dict[str, np.ndarray]:
    """The same numbers under every name and shape that the spellings use."""
    random = np.random.default_rng(0)
    found = {f"w{role}": random.normal(0, 0.3, (WIDTH, WIDTH)).astype(np.float32) for role in "qkvo"}
    found |= {f"b{role}": random.normal(0, 0.3, WIDTH).astype(np.float32) for role in "qkvo"}
    for role in "qkv":
        found[f"b{role}_heads"] = found[f"b{role}"].reshape(HEADS, HEAD)
        found[f"w{role}_heads"] = found[f"w{role}"].reshape(WIDTH, HEADS, HEAD)
    found["wo_heads"] = found["wo"].reshape(HEADS, HEAD, WIDTH)
    found["wq_turned"], found["wk_double"] = found["wq"].T.copy(), found["wk"].astype(np.float64)
    found["w_packed"] = np.concatenate([found[f"w{role}"] for role in "qkv"], 1)
    found["b_packed"] = np.concatenate([found[f"b{role}"] for role in "qkv"])
    found["w_interleaved"] = np.stack([found[f"w{role}_heads"] for role in "qkv"], 2).reshape(WIDTH, -1)
    found["b_interleaved"] = np.stack([found[f"b{role}_heads"] for role in "qkv"], 1).reshape(-1)
    found["root"] = np.array(np.sqrt(HEAD), np.float32)
    found["scale0"] = np.array(0.35355338, np.float32)
    found["heads0"], found["joined0"] = np.array([0, 0, 2, 8]), np.array([0, 0, 16])
    found["ones"], found["last_six"] = np.ones(3, np.int64), np.arange(4, 10)[:, None].copy()
    for name, size in {"six": 6, "nine": 9, "kernel": (6, 6, 3, 3), "depthwise": (6, 1, 3, 3)}.items():
        found[name] = random.normal(0, 0.5, size).astype(np.float32)
    found["six_positive"] = np.abs(found["six"]) + 0.5
    found["twice"], found["half"] = np.array([1, 1, 2, 2], np.float32), np.array([1, 1, 0.5, 0.5], np.float32)
    found["thirds"], found["column"], found["cube"] = np.array([1, 2, 3]), np.array([3, 1]), np.array([1, 1, 16])
    found["places"], found["wide"] = np.arange(6)[None, ::-1, None, None].copy(), np.array(10, np.float32)
    return found


def proto(
    body: str, opset: int, inputs: str = "float[B,10,16] x", outputs: str = "float[B,10,16] y"
) -> onnx.ModelProto:
    """A model of this body with the weights that it names."""
    header = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    made = parse_model(f"{header} attention ({inputs}) => ({outputs}) {{ {body} }}")
    nodes = made.graph.node
    read = {name for node in nodes for name in node.input} - {name for node in nodes for name in node.output}
    found = weights()
    made.graph.initializer.extend(numpy_helper.from_array(found[name], name) for name in sorted(read & found.keys()))
    for place, node in enumerate(made.graph.node):
        node.name = f"node{place}"
    return made


def spelled(name: str) -> ir.Model:
    opset, body = SPELLINGS[name]
    return ir.serde.deserialize_model(proto(body, opset))


def odd(name: str) -> ir.Model:
    """The plain spelling with odd scores; x and a mask [B, 1, 1, 10] of keys are its inputs."""
    opset, body = SPELLINGS["plain"]
    body = body.replace("p = Softmax<axis=-1>(s2)", f"{ODD_SCORES[name][1]}\n  p = Softmax<axis=-1>(s3)")
    return ir.serde.deserialize_model(proto(body, opset, "float[B,10,16] x, bool[B,1,1,10] mask"))
