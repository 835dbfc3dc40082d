"""An ONNX file as a source: whether it is one and can be read, and the attention that is found in the file itself."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from attnrewrite.errors import InputError
from attnrewrite.files import as_path, check_file
from attnrewrite.images.preprocessing import parse_size
from attnrewrite.patterns.graph import GraphView
from attnrewrite.site import Scan


def is_onnx(source: object) -> bool:
    """Whether a source is an ONNX file, whose inputs have a type and order of their own."""
    return isinstance(source, str | Path) and Path(source).suffix == ".onnx" and "://" not in str(source)


def examine_onnx(
    path: Path, input_size: str | Sequence[int] | None = None, checkpoint: str | None = None
) -> tuple[GraphView, Scan]:
    """An ONNX file's graph and every attention in it, found in the file itself.

    Raises:
        InputError: the file is not there or damaged, or onnx is not installed.
    """
    path = as_path(path)
    check_onnx(path, checkpoint)
    from attnrewrite.frontends.onnx.file import examine_file

    return examine_file(path, None if input_size is None else parse_size(input_size))


def check_onnx(path: Path, checkpoint: str | None) -> None:
    """Raise InputError unless the file can be read and is given no weights."""
    check_file(path, "model")
    missing = [package for package in ("onnx", "onnx_ir", "onnxscript", "onnxruntime") if find_spec(package) is None]
    if missing:
        raise InputError(f"{', '.join(missing)} not installed: pip install 'attnrewrite[onnx]' to read ONNX models")
    if checkpoint is not None:
        raise InputError(f"{path} is an ONNX model, whose weights are inside: it takes no --checkpoint")
