"""What is tried with each kind of damaged file, and what is right where it goes through."""

import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from fuzz.mutations import (
    archive_damaged,
    damaged,
    json_damaged,
    npy_damaged,
    proto_damaged,
    safetensors_damaged,
    toml,
    toml_damaged,
)
from fuzz.seeds import CONFIGS, SIZE, Seeds

Right = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Sound:
    """Files that are sound together, and the command lines that read them, each with how often it is drawn."""

    files: Mapping[str, bytes]
    lines: Mapping[str, int]


@dataclass(frozen=True)
class Subject:
    """A kind of file: how often it is tried, sound sets of files, of which one is drawn, the files in it that `damage`
    may be done to, as a pattern of names, and what must be true after a
    command that went through, given its line and what it printed.
    """

    weight: int
    sets: Callable[[Seeds], Sequence[Sound]]
    bad: str
    damage: Callable[[bytes, Random], bytes]
    right: Right = lambda line, said: None

    def damaged(self, seeds: Seeds, random: Random) -> tuple[str, Mapping[str, bytes]]:
        """A command line, and the files that it reads, one of them damaged."""
        sound = random.choice(self.sets(seeds))
        name = random.choice(sorted(name for name in sound.files if fnmatch(name, self.bad)))
        line = random.choices(list(sound.lines), list(sound.lines.values()))[0]
        return line, {**sound.files, name: self.damage(sound.files[name], random)}


def _evaluated(line: str, said: dict[str, Any]) -> None:
    """The accuracy is that of the weights in the file on the images in the file, by other readers than ours."""
    if "--data" not in line:
        return
    state, images = _state(line), np.load(_word(line, "--data"))
    model = _vit()
    model.load_state_dict(state)
    pixels = torch.from_numpy(images["x"]).permute(0, 3, 1, 2).float() / 255
    with torch.no_grad():
        logits = model((pixels - 0.5) / 0.5)
        exact = model.double()((pixels.double() - 0.5) / 0.5)
    answers = logits.argmax(-1).numpy()
    if (exact.argmax(-1).numpy() != answers).any():  # weights so odd that rounding decides what is largest
        return
    labels = images.get("y")
    assert said["n"] == len(answers), "all images count"
    wanted = None if labels is None else 100 * float((answers == labels).mean())
    assert said["top1"] == wanted or abs(said["top1"] - wanted) < 1e-6, f"top-1 is {wanted}, not {said['top1']}"


def _word(line: str, option: str) -> str:
    words = line.split()
    return words[words.index(option) + 1]


def _vit() -> nn.Module:
    from tiny_vits import Vit

    torch.manual_seed(0)
    return Vit(1).eval()


def _state(line: str) -> Mapping[str, Tensor]:
    if "--checkpoint" not in line:
        return _vit().state_dict()
    path = Path(_word(line, "--checkpoint"))
    if path.suffix != ".safetensors":
        found = torch.load(path, weights_only=True)
        return next((found[key] for key in ("state_dict", "model_state_dict", "model") if key in found), found)
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    types = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I32": np.int32, "I64": np.int64, "U8": np.uint8}
    return {
        name: torch.from_numpy(
            np.frombuffer(content[start:][slice(*of["data_offsets"])], types[of["dtype"]]).reshape(of["shape"]).copy()
        )
        for name, of in header.items()
        if name != "__metadata__"
    }


def _same_onnx(line: str, said: dict[str, Any]) -> None:
    """Softmax put in softmax's place gives the same model, in onnxruntime."""
    if not line.startswith("convert") or "--dry-run" in line:
        return
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    sessions = [onnxruntime.InferenceSession(path, options) for path in ("model.onnx", "out/model.onnx")]
    random = np.random.default_rng(5)
    given = {each.name: _drawn(each, random) for each in sessions[0].get_inputs()}
    for pair in zip(*(session.run(None, given) for session in reversed(sessions)), strict=True):
        found, wanted = (each.astype(np.float64) for each in pair)
        known = np.isfinite(wanted)
        scale = np.abs(wanted[known]).max(initial=1e-6)
        assert np.abs(found[known] - wanted[known]).max(initial=0) <= 1e-3 * scale, (
            "the converted file is another model"
        )


def _drawn(value: Any, random: np.random.Generator) -> np.ndarray:
    size = [length if isinstance(length, int) else 2 for length in value.shape]
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    types = {"float": np.float32, "double": np.float64, "float16": np.float16, "bool": np.bool_}
    number = types.get(kind, getattr(np, kind, np.float32))
    return (random.random(size) < 0.7) if number is np.bool_ else random.normal(0, 1, size).astype(number)


def _same_program(line: str, said: dict[str, Any]) -> None:
    """Softmax put in softmax's place gives the same program."""
    if not line.startswith("convert"):
        return
    sound, made = (torch.export.load(path) for path in ("model.pt2", "out/model.pt2"))
    inputs = sound.example_inputs[0]
    wanted, found = sound.module()(*inputs), made.module()(*inputs)
    assert torch.allclose(wanted, found, atol=1e-3, equal_nan=True), "the converted program is another model"


def _counted(line: str, said: dict[str, Any]) -> None:
    if "--data" in line and "--dry-run" not in line:
        assert said["n"] in ((1, 2) if "--skip-bad" in line else (2,)), "all images count"


EVALUATE = f"evaluate models.py:vit {SIZE}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_OPERATORS = _words(
    "MatMul Add Mul Softmax Reshape Transpose Einsum Gemm Conv Attention MultiHeadAttention SkipLayerNormalization "
    "FusedMatMul Where Cast Clip Dropout Split Concat Slice Gather If Loop Scan Constant Shape Size Squeeze Unsqueeze "
    "Expand ReduceMax ReduceMean Pad LayerNormalization Identity Trilu Tile BatchNormalization QuickGelu Gelu BiasGelu "
    "Flatten Range Min Max Pow Erf Resize QuantizeLinear DequantizeLinear RandomNormal ScatterND GatherND TopK "
    "com.microsoft ai.onnx perm axis axes to value num_heads scale equation value_ints epsilon bhnd,bhmd->bhnm ->"
)
_MIL_OPERATORS = _words(
    "matmul softmax add mul reshape transpose linear conv split concat gather slice_by_index expand_dims squeeze "
    "reduce_mean layer_norm const constexpr_affine_dequantize constexpr_lut_to_dense einsum cast main x y"
)


def _weights(name: str) -> Callable[[Seeds], Sequence[Sound]]:
    lines = {f"{EVALUATE} --data sound.npz --checkpoint {name}": 1}
    return lambda seeds: [Sound({name: seeds.beside[name.replace("bad", "sound")]}, lines)]


def _converted(lines: Mapping[str, int]) -> Callable[[Seeds], Sequence[Sound]]:
    return lambda seeds: [Sound({f"converted/{name}": content for name, content in seeds.converted.items()}, lines)]


def _models(seeds: Seeds) -> Sequence[Sound]:
    lines = {
        "explain model.onnx": 4,
        "convert model.onnx --variant l1 --out out --dry-run": 5,
        "convert model.onnx --variant softmax --out out": 1,
    }
    return [Sound({"model.onnx": model}, lines) for model in seeds.onnx.values()]


def _programs(seeds: Seeds) -> Sequence[Sound]:
    lines = {
        "explain model.pt2": 4,
        "evaluate model.pt2 --mean 0.5 --std 0.5 --data sound.npz": 4,
        "convert model.pt2 --variant softmax --out out": 1,
    }
    return [Sound({"model.pt2": seeds.converted["model.pt2"]}, lines)]


def _pictures(seeds: Seeds) -> Sequence[Sound]:
    lines = {f"{EVALUATE} --data pictures": 1, f"{EVALUATE} --data pictures --skip-bad": 1}
    return [Sound({f"pictures/{name}": content}, lines) for name, content in seeds.pictures.items()]


def _configurations(seeds: Seeds) -> Sequence[Sound]:
    return [Sound({"options.toml": toml(said)}, {f"{line} --config options.toml": 1}) for line, said in CONFIGS.items()]


def _packages(seeds: Seeds) -> Sequence[Sound]:
    files = {f"model.mlpackage/{name}": content for name, content in seeds.package.items()}
    return [Sound(files, {"explain model.mlpackage": 1})]


def _package_damaged(content: bytes, random: Random) -> bytes:
    """A file of a Core ML package: its list of files, its program, or its weights."""
    from coremltools.proto import Model_pb2
    from google.protobuf.message import DecodeError

    if content[:1] == b"{":
        return json_damaged(content, random)
    try:
        return proto_damaged(Model_pb2.Model.FromString(content), random, _MIL_OPERATORS)
    except DecodeError:
        return damaged(content, random)


def _member_damaged(content: bytes, random: Random) -> bytes:
    """A member of an archive as what it is: JSON, or bytes."""
    return json_damaged(content, random) if content[:1] in (b"{", b"[") else damaged(content, random)


_MAPS = "explain converted --image pictures/good.png --maps maps.html"
_REPLACED = "convert models.py:vit --input-size 3x16x16 --out converted --force --dry-run"
_REPORTED = {"evaluate converted --data sound.npz": 5, "sites converted": 2, _MAPS: 1, _REPLACED: 1}
SUBJECTS: Mapping[str, Subject] = {
    "onnx": Subject(
        30, _models, "model.onnx",
        lambda content, random: proto_damaged(onnx.ModelProto.FromString(content), random, _OPERATORS), _same_onnx,
    ),
    "safetensors": Subject(10, _weights("bad.safetensors"), "bad.safetensors", safetensors_damaged, _evaluated),
    "pth": Subject(10, _weights("bad.pth"), "bad.pth", archive_damaged, _evaluated),
    "npz": Subject(
        10, lambda seeds: [Sound({"bad.npz": seeds.beside["sound.npz"]}, {f"{EVALUATE} --data bad.npz": 1})], "bad.npz",
        lambda content, random: archive_damaged(content, random, npy_damaged), _evaluated,
    ),
    "pictures": Subject(10, _pictures, "pictures/*", damaged, _counted),
    "plan.json": Subject(
        6, _converted({"plan converted": 5, _MAPS: 1, _REPLACED: 1}), "converted/plan.json", json_damaged
    ),
    "report.json": Subject(6, _converted(_REPORTED), "converted/report.json", json_damaged),
    "plan's weights": Subject(
        2, _converted({"plan converted": 1}), "converted/weights.safetensors", safetensors_damaged
    ),
    "configuration": Subject(
        8, _configurations, "options.toml",
        lambda content, random: toml_damaged(tomllib.loads(content.decode()), random),
    ),
    "pt2": Subject(
        5, _programs, "model.pt2",
        lambda content, random: archive_damaged(content, random, _member_damaged), _same_program,
    ),
    "mlpackage": Subject(
        5, _packages,
        "model.mlpackage/*", _package_damaged,
    ),
}  # fmt: skip
