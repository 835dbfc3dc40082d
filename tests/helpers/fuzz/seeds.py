"""The small sound files that are damaged: models in ONNX, what convert makes of one, weights, images, options."""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from onnx_spellings import ODD_SCORES, SPELLINGS, proto
from PIL import Image
from safetensors.torch import save

MODELS = """
import torch
import tiny_vits

class Vit(tiny_vits.Vit):
    def forward(self, x):
        assert x.shape[-2] * x.shape[-1] <= 65536, "a picture that takes minutes"
        return super().forward(x)

def vit():
    torch.manual_seed(0)
    return Vit(1)
"""
SIZE = "--input-size 3x16x16 --mean 0.5 --std 0.5"
PICTURE_MODEL = (
    """
  patches = Conv<kernel_shape=[4, 4], strides=[4, 4]>(image, w_patches)
  flat = Constant<value_ints=[0, 16, 16]>()
  rows = Reshape(patches, flat)
  x = Transpose<perm=[0, 2, 1]>(rows)
"""
    + SPELLINGS["plain"][1].replace("y = Add(o3, bo)", "y0 = Add(o3, bo)")
    + """
  pooled = ReduceMean<axes=[1], keepdims=0>(y0)
  y = MatMul(pooled, w_head)
"""
)
# What --config files say, by command; whatever is wrong in them is told before anything is written.
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "convert models.py:vit --out out --dry-run": {
        "variant": "l1", "option": {"centred": False}, "calibrate": "sound.npz", "samples": 9,
        "steps": 2, "mean": [0.5, 0.5, 0.5], "std": 0.5, "input-size": "3x16x16", "seed": 3, "threads": 1,
        "skip-bad": True, "checkpoint": "sound.pth", "force": True,
    },
    "convert models.py:vit --calibrate sound.npz --out out --dry-run": {
        "variant": "auto", "max-drop": 0.5, "input-size": "3x16x16", "mean": "0.5", "std": "0.5",
    },
    "evaluate models.py:vit --dry-run": {
        "data": "sound.npz", "samples": 3, "batch-size": 2, "mean": [0.5], "std": [0.5, 0.5, 0.5],
        "input-size": "3x16x16",
    },
    "explain models.py:vit --dry-run": {"input-size": "3x16x16", "graph": "graph.html", "force": False, "seed": 1},
    "lower models.py:vit --out out --dry-run": {
        "target": "host", "input-size": "3x16x16", "threads": 1, "explain": True,
    },
    "compare models.py:vit --out out --dry-run": {
        "target": ["host"], "data": "sound.npz", "input-size": [3, 16, 16], "mean": 0, "std": 1,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Seeds:
    """Sound files as bytes. `beside` lies in every case's folder; `converted` is what convert wrote, by name."""

    beside: Mapping[str, bytes]
    onnx: Mapping[str, bytes]
    pictures: Mapping[str, bytes]
    converted: Mapping[str, bytes]
    package: Mapping[str, bytes]


def make(folder: Path, *, converted: bool = True, package: bool = True) -> Seeds:
    """All of them, or all but what takes longest, made in `folder`, which stays as long as they are used: the converted
    model names its original.
    """
    from tiny_vits import Vit

    torch.manual_seed(0)
    state = Vit(1).state_dict()
    stream = io.BytesIO()
    torch.save({"model": state, "epoch": 3}, stream)
    pixels = np.random.default_rng(0).integers(0, 256, (9, 16, 16, 3), dtype=np.uint8)
    beside = {
        "models.py": MODELS.encode(),
        "sound.npz": _npz(x=pixels, y=np.arange(9) % 5),
        "sound.pth": stream.getvalue(),
        "sound.safetensors": save(state),
    }
    models = {"pictures": picture_model()}
    models |= {name: proto(body, opset) for name, (opset, body) in SPELLINGS.items()}
    plain = SPELLINGS["plain"][1]
    for name, (_, change) in ODD_SCORES.items():
        body = plain.replace("p = Softmax<axis=-1>(s2)", f"{change}\n  p = Softmax<axis=-1>(s3)")
        models[name] = proto(body, 17, "float[B,10,16] x, bool[B,1,1,10] mask")
    onnx.save(models["pictures"], folder / "pictures.onnx")
    return Seeds(
        beside,
        {name: model.SerializeToString() for name, model in models.items()},
        _pictures(pixels),
        _converted(folder) if converted else {},
        _package(folder) if package else {},
    )


def picture_model() -> onnx.ModelProto:
    """[B, 3, 16, 16] -> [B, 5]: 16 patches of 16 channels, one attention of 2 heads."""
    made = proto(PICTURE_MODEL, 17, "float[B,3,16,16] image", "float[B,5] y")
    random = np.random.default_rng(1)
    sizes = {"w_patches": (16, 3, 4, 4), "w_head": (16, 5)}
    own = [
        numpy_helper.from_array(random.normal(0, 0.5, size).astype(np.float32), name) for name, size in sizes.items()
    ]
    made.graph.initializer.extend(own)
    return made


def _npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def _pictures(pixels: np.ndarray) -> dict[str, bytes]:
    found = {}
    for name, how in {
        "a.png": {}, "b.jpg": {}, "c.gif": {}, "d.bmp": {}, "e.webp": {}, "f.tiff": {}, "g.ppm": {},
        "h.jpeg": {"progressive": True}, "i.png": {"mode": "P"}, "j.png": {"mode": "RGBA"},
    }.items():  # fmt: skip
        stream = io.BytesIO()
        picture = Image.fromarray(pixels[:2].reshape(32, 16, 3)).convert(how.pop("mode", "RGB"))
        picture.save(stream, {"jpg": "jpeg"}.get(name[2:], name[2:]), **how)
        found[name] = stream.getvalue()
    return found


def _converted(folder: Path) -> dict[str, bytes]:
    from attnrewrite.cli.main import main

    out = folder / "converted"
    code = main(f"convert {folder}/pictures.onnx --mean 0.5 --std 0.5 --variant l1 --out {out} --json".split())
    assert code == 0, "the sound model is converted"
    return _files(out)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _package(folder: Path) -> dict[str, bytes]:
    """A Core ML package of one attention, written operator by operator."""
    from attnrewrite.targets.coreml.package import quiet

    weight = np.random.default_rng(0).normal(0, 0.3, (48, 16)).astype(np.float32)
    with quiet():
        import coremltools as ct
        from coremltools.converters.mil.mil import Builder as mb

        @mb.program(input_specs=[mb.TensorSpec((1, 10, 16))], opset_version=ct.target.iOS17)
        def attention(x: Any) -> Any:
            split = mb.transpose(
                x=mb.reshape(x=mb.linear(x=x, weight=weight), shape=[1, 10, 3, 2, 8]), perm=[2, 0, 3, 1, 4]
            )
            query, key, value = mb.split(x=split, num_splits=3, axis=0)
            weights = mb.softmax(x=mb.matmul(x=query, y=key, transpose_y=True), axis=-1)
            return mb.reshape(x=mb.matmul(x=weights, y=value), shape=[1, 20, 8])

        made = ct.convert(
            attention, convert_to="mlprogram", minimum_deployment_target=ct.target.iOS17, skip_model_load=True
        )
        made.save(str(folder / "sound.mlpackage"))
    return _files(folder / "sound.mlpackage")
