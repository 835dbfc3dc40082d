"""ONNX models exported and run in onnxruntime, for tests."""

import warnings

import numpy as np
import onnx_ir as ir
import onnxruntime
import torch
from tiny_vits import IMAGE, Vit


def run(model: ir.Model, *arrays: np.ndarray) -> list[np.ndarray]:
    data = ir.serde.serialize_model(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return session.run(None, dict(zip([value.name for value in session.get_inputs()], arrays, strict=True)))


def exported_vit(model: Vit) -> ir.Model:
    """The model's ONNX file as torch writes it, with an open batch."""
    with warnings.catch_warnings(action="ignore"):
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        image = torch.randn(2, *IMAGE[1:], dtype=model.head.weight.dtype)
        program = torch.onnx.export(model, (image,), dynamo=True, dynamic_shapes=shapes, verbose=False)
    assert program is not None
    return ir.serde.deserialize_model(program.model_proto)
