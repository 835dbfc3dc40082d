"""The operators of ONNX in the matcher's vocabulary."""

from attnrewrite.errors import Refusal
from attnrewrite.patterns.graph import Kind
from attnrewrite.patterns.quantised import UNQUANTISED


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _lowered(text: str) -> dict[str, str]:
    return {name: name.lower() for name in text.split()}


# ONNX name -> the name the matcher knows, where it asks for one
MOVES = {
    **{
        name: name.lower() for name in _words("Reshape Transpose Slice Split Squeeze Unsqueeze Expand Flatten Pad Tile")
    },
    **{
        name: name.lower() for name in _words("Trilu GatherElements GatherND DepthToSpace SpaceToDepth ReverseSequence")
    },
    "Compress": "compress",
    "Concat": "cat",
    "Gather": "index",
    "ScatterND": "slice_scatter",
    "CenterCropPad": "pad",
}
MOVED = {"ScatterND": (0, 2)}  # the operands whose elements move, where they are not the first alone
IDENTITIES = frozenset(_words("Identity Cast CastLike Dropout"))
MAPS = {
    **{
        name: name.lower()
        for name in _words("Add Sub Mul Div Neg Abs Exp Log Sqrt Pow Tanh Sigmoid Relu Gelu Where Erf")
    },
    **{
        name: name.lower()
        for name in _words("Sin Cos Clip Min Max Not And Or Xor Equal Less Greater LessOrEqual IsNaN")
    },
    **{
        name: name.lower() for name in _words("GreaterOrEqual IsInf Mod Floor Ceil Round Reciprocal Sign Elu Selu Celu")
    },
    **{
        name: name.lower() for name in _words("LeakyRelu PRelu ThresholdedRelu Softplus Softsign HardSwish HardSigmoid")
    },
    **_lowered("Mish Swish FastGelu BiasGelu QuickGelu BitwiseAnd"),
    "Sum": "add",
    "QuantizeLinear": "quantize",
    "DequantizeLinear": "dequantize",
}
NORMS = {
    "LayerNormalization": "layer_norm",
    "RMSNormalization": "rms_norm",
    "SimplifiedLayerNormalization": "layer_norm",
    "BatchNormalization": "batch",
    "GroupNormalization": "group_norm",
    "InstanceNormalization": "instance_norm",
    "LpNormalization": "lp_norm",
    "MeanVarianceNormalization": "instance_norm",
}
POOLS = frozenset(_words("AveragePool MaxPool LpPool GlobalAveragePool GlobalMaxPool GlobalLpPool Resize Upsample"))
REDUCTIONS = {
    "ReduceMean": "mean",
    "ReduceSum": "sum",
    "ReduceMax": "amax",
    "ReduceMin": "amin",
    "ReduceL1": "norm",
    "ReduceL2": "norm",
    "ReduceProd": "prod",
    "ReduceSumSquare": "norm",
    "ReduceLogSumExp": "logsumexp",
}
BINARY = frozenset(_words("Add Sub Mul Div Pow Min Max"))
FEW_BITS = frozenset(_words("MatMulNBits MatMulBnb4"))  # whose weights are packed
QUANTISED = FEW_BITS | frozenset(
    _words("QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger ConvInteger QLinearMatMul QLinearConv")
    + _words("QGemm DynamicQuantizeMatMul MatMulIntegerToFloat QLinearAdd QLinearMul QLinearSigmoid")
)
# what to give in place of a model whose attention computes on integers
UNQUANTISED_FILE = f"{UNQUANTISED}, or in QDQ form (onnxruntime's QuantFormat.QDQ)"
_DRAWS = frozenset(_words("Bernoulli Multinomial RandomNormal RandomNormalLike RandomUniform RandomUniformLike"))
# onnxruntime's blocked layout: what a value holds depends on the vectors of the processor that it was written for
_BLOCKED = "com.microsoft.nchwc"
_UNBLOCKED = (
    "onnxruntime laid it out for one processor; give the model before it was optimised, or saved at ORT_ENABLE_EXTENDED"
)
SHAPE_ONLY = frozenset(_words("Shape Size EyeLike"))  # they read their operand's size, not its elements

SIMPLE: dict[str, tuple[Kind, str]] = {
    **{name: ("move", known) for name, known in MOVES.items()},
    **dict.fromkeys(IDENTITIES, ("map", "identity")),
    **{name: ("map", known) for name, known in MAPS.items()},
    **{name: ("norm", known) for name, known in NORMS.items()},
    **{name: ("pool", name.lower()) for name in POOLS},
    **{name: ("reduce", known) for name, known in REDUCTIONS.items()},
}


def unreadable(domain: str, operator: str) -> Refusal | None:
    """Why an operator is not read in plain numbers, with the way out; None where nothing special is known of it."""
    if operator in QUANTISED:
        return Refusal("quantized", f"it computes on integers; {UNQUANTISED_FILE}")
    if operator in _DRAWS:
        return Refusal("unsupported-operator", "it draws random numbers; export the model with these as an input")
    return Refusal("unsupported-operator", _UNBLOCKED) if domain == _BLOCKED else None
