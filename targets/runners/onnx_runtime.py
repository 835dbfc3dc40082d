"""onnxruntime on this machine: what a user would run otherwise, so what the host target is compared with."""

import warnings
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from attnrewrite.errors import InputError, first_line
from attnrewrite.targets.prepare import arrays, specialise


def prepare(module: nn.Module, inputs: tuple[Tensor, ...], threads: int) -> tuple[Callable[[], object], int]:
    """A call of the module's ONNX export in onnxruntime on the processor, and the export's size in bytes.

    Raises:
        InputError: onnxruntime or onnxscript is not installed, or torch.onnx cannot export the module.
    """
    model = export(module, inputs)
    return load(model, inputs, threads), len(model)


def load(model: bytes, inputs: tuple[Tensor, ...], threads: int) -> Callable[[], object]:
    """A call of an ONNX file's content in onnxruntime on the processor."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Idle threads that spin would take time from the runtimes measured in turn with this one.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = dict(zip(names, arrays(inputs), strict=True))
    return lambda: session.run(None, feed)


def export(module: nn.Module, inputs: tuple[Tensor, ...]) -> bytes:
    """The module as the content of an ONNX file.

    Raises:
        InputError: onnxruntime or onnxscript is not installed, or torch.onnx cannot export the module.
    """
    for package in ("onnxruntime", "onnxscript"):
        if find_spec(package) is None:
            raise InputError(f"{package} is not installed (pip install 'attnrewrite[onnx]')")
    program = specialise(module, inputs)
    try:
        with warnings.catch_warnings(action="ignore"):
            exported = torch.onnx.export(program, dynamo=True, verbose=False)
    except Exception as error:
        raise InputError(f"torch.onnx cannot export the module: {first_line(error)}") from error
    assert exported is not None
    return exported.model_proto.SerializeToString()
