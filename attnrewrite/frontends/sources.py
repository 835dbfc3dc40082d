"""What a model can be given as, and how each becomes a module or an exported program with inputs to run it on.

an nn.Module, an ExportedProgram, model.pt2, model.onnx, a converted folder, path/file.py:factory,
timm:NAME, torchvision:NAME, hf:FOLDER or hf:NAME
"""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.export import ExportedProgram

from attnrewrite.errors import InputError, first_line, refuse_given, unknown_name
from attnrewrite.files import as_path, read_json
from attnrewrite.frontends.capture import inputs_of
from attnrewrite.frontends.checkpoints import SUFFIXES, load_checkpoint, read_program
from attnrewrite.frontends.examples import TEXT, given_examples, made_example, many_as_taken, reads_tokens, require_runs
from attnrewrite.frontends.factories import call_factory, split_factory
from attnrewrite.frontends.libraries import LIBRARIES, PRETRAINED, build
from attnrewrite.frontends.onnx.scan import check_onnx, is_onnx
from attnrewrite.frontends.packed import with_plain_weights
from attnrewrite.frontends.trust import NO_CODE, code_digest, remembered
from attnrewrite.images.preprocessing import (
    Preprocessing,
    Size,
    as_taken,
    format_size,
    image_size,
    override,
    parse_size,
)
from attnrewrite.site import Scan

__all__ = ["Origin", "Preprocessing", "Source", "load_source"]


@dataclass(frozen=True)
class Origin:
    """Where a model came from, as JSON-able values: what `load_source` needs to load it again. Paths are absolute."""

    spec: str
    checkpoint: str | None = None
    input_size: tuple[int, int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: Annotated[float, Field(ge=0.01, le=10)] = 1.0  # beyond these a resized picture has no pixels, or too many
    interpolation: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"] = "bicubic"
    labels: tuple[str, ...] | None = None

    @property
    def preprocessing(self) -> Preprocessing | None:
        if self.mean is None or self.std is None:
            return None
        return Preprocessing(self.mean, self.std, self.crop, self.interpolation)

    @property
    def file(self) -> Path | None:
        """The file that holds the model; None for a model of a library."""
        if self.spec.partition(":")[0] in LIBRARIES:
            return None
        return split_factory(self.spec)[0] if _is_factory(self.spec) else Path(self.spec)

    @property
    def runs_code(self) -> bool:
        """Whether loading it may run what its file says: a Python file, or the expressions of an exported program."""
        if self.file is None:
            return False
        return _is_factory(self.spec) or self.file.suffix != ".onnx" or self.file.is_dir()

    def load(self) -> "Source":
        """The model again, with the same weights, by whatever code it names: see `Source.original`.

        Raises:
            InputError: it is no longer there.
        """
        source = load_source(self.spec, checkpoint=self.checkpoint, input_size=self.input_size)
        return replace(source, preprocessing=as_taken(self.preprocessing, source.example_inputs[0]))


@dataclass(frozen=True)
class Source:
    """A model that was loaded: a module in evaluation mode, or an exported program, never both.

    example_inputs: what it runs on: [1, C, H, W] where attnrewrite made it.
    origin: how to load it again (a converted folder: how to load its original); None for what exists in memory only.
    folder: the converted folder that it was read from.
    onnx_scan: what was found in the ONNX file that it was imported from: the names of its sites, and what they allow.
    code: the digest of the file whose code made it, NO_CODE where none did; None of a folder and of what exists in
        memory only.
    labels: the names of the classes, where the model's own configuration has them.
    left_out: what of a quantised file the model leaves out, as report.json has it.
    """

    name: str
    model: nn.Module | None
    program: ExportedProgram | None
    example_inputs: tuple[Tensor, ...]
    preprocessing: Preprocessing | None = None
    origin: Origin | None = None
    folder: Path | None = None
    onnx_scan: Scan | None = None
    code: str | None = None
    labels: tuple[str, ...] | None = None
    left_out: Mapping[str, float] | None = None

    def original(self, spec: str | None = None, checkpoint: str | None = None) -> "Source":
        """The model that this converted folder was made from: `spec` and `checkpoint` where they are given, else as the
        folder's report says, if no code would run by it that this user did not name.

        Raises:
            InputError: it is not known or no longer there, or may not be loaded unasked; the message says what to give.
        """
        if self.folder is None:
            raise InputError(f"{self.name} is not a folder that convert wrote: it has no original")
        origin = self.origin
        if origin is None and spec is None:
            raise InputError(
                f"{self.folder} was converted from a model in memory, and its report cannot say where that is: where a "
                "file or a library has it, name it with --original"
            )
        if origin is None:
            origin = _describe(Origin(str(spec)), replace(self, folder=None))
        elif spec is None:
            _require_own(origin, self.folder)
        return replace(origin, spec=spec or origin.spec, checkpoint=checkpoint or origin.checkpoint).load()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Its weights and buffers by name."""
        if self.program is not None:
            return self.program.state_dict
        return {} if self.model is None else dict((*self.model.named_parameters(), *self.model.named_buffers()))

    @property
    def input_size(self) -> Size:
        """(channels, height, width) of the images that it takes. Raises InputError where it takes no images."""
        return image_size(self.example_inputs[0].shape)


def load_source(
    source: "str | Path | nn.Module | ExportedProgram | Source",
    example_inputs: Tensor | Sequence[Tensor] | None = None,
    *,
    checkpoint: str | Path | None = None,
    input_size: str | Sequence[int] | None = None,
    mean: str | float | Sequence[float] | None = None,
    std: str | float | Sequence[float] | None = None,
) -> Source:
    """Load a model from whatever it is given as, in evaluation mode, and see that it runs on its example inputs.

    Args:
        source: see the module docstring. `file.py:factory` runs that Python file; nothing else runs foreign code.
        example_inputs: what the model runs on; without it, `input_size` or the model's own configuration says.
        checkpoint: a file of weights, loaded strictly, or "pretrained" to download what timm, torchvision or the
            Hugging Face hub publish under the name. Nothing is downloaded otherwise.
        input_size: '3x224x224', '224' or (3, 224, 224).
        mean, std: of the pixels in 0..1, one number or one per channel; they override the model's own configuration.

    Raises:
        InputError: what was given cannot be used, and what can be done.
    """
    if isinstance(source, Source):
        refuse_given(
            f"{source.name} has its weights and inputs already",
            checkpoint=checkpoint, input_size=input_size, example_inputs=example_inputs,
        )  # fmt: skip
        return _prepared_by(source, mean, std)
    size = None if input_size is None else parse_size(input_size)
    weights = None if checkpoint is None else str(checkpoint)
    if isinstance(source, nn.Module):
        loaded = _from_module(source, weights)
    elif isinstance(source, ExportedProgram):
        loaded = _from_program(source, "program", weights)
    elif isinstance(source, str | Path):
        loaded = _from_spec(str(source), weights, size)
    else:
        raise InputError(f"a {type(source).__name__} is not a model: give an nn.Module, an ExportedProgram or a name")
    if example_inputs is None:
        sized = size is not None and loaded.model is not None and not is_onnx(source)
        inputs = made_example(size) if sized and size else loaded.example_inputs
    else:
        inputs = given_examples(example_inputs)
    if not inputs and loaded.model is not None and reads_tokens(loaded.model):
        raise InputError(f"{loaded.name}: {TEXT}")
    if not inputs:
        raise InputError(f"{loaded.name}: the size of its input is not known: give --input-size, such as 3x224x224")
    loaded = _prepared_by(replace(loaded, example_inputs=inputs), mean, std)
    if loaded.program is not None:
        _check_exported_for(loaded, size, given=example_inputs is not None)
    elif loaded.model is not None and example_inputs is not None:
        require_runs(loaded.name, loaded.model, inputs)
    elif loaded.model is not None:
        loaded = replace(loaded, example_inputs=many_as_taken(loaded.name, loaded.model, inputs))
    if loaded.model is not None:
        loaded = replace(loaded, model=with_plain_weights(loaded.name, loaded.model, loaded.example_inputs))
    return replace(loaded, origin=_describe(loaded.origin, loaded) if loaded.origin else None)


def _prepared_by(source: Source, mean: object, std: object) -> Source:
    """`source` with its pictures prepared by `mean` and `std`, where they are given, and as its example shows."""
    first = source.example_inputs[0]
    if not first.is_floating_point() and (mean, std) != (None, None):
        raise InputError(f"{source.name} takes the pixels themselves ({first.dtype}): leave out --mean and --std")
    return replace(source, preprocessing=as_taken(override(source.preprocessing, mean, std), first))


def _require_own(origin: Origin, folder: Path) -> None:
    """Raise InputError where loading `origin`, which a folder's report names, would do what nobody asked for.

    It is asked for where this user wrote the folder on this machine, and the code's file is still what it was then.
    """
    give = f"to load it, name it: --original {origin.spec}"
    if origin.checkpoint is not None and origin.checkpoint != PRETRAINED and not Path(origin.checkpoint).is_absolute():
        raise InputError(f"{folder} names its original's weights by a relative path, {origin.checkpoint}; {give}")
    if origin.file is not None and not origin.file.is_absolute():
        raise InputError(f"{folder} names its original by a relative path, {origin.spec}; {give}")
    if not (origin.runs_code or origin.checkpoint == PRETRAINED):
        return
    wrote = remembered(folder)
    if wrote is None:
        raise InputError(
            f"{folder} was not written by you on this machine, and loading the original that it names would run or "
            f"download what it says; {give}"
        )
    if origin.runs_code and origin.file is not None and wrote != code_digest(origin.file):
        raise InputError(f"{origin.file} has changed since {folder} was made from it; {give}")


def _describe(origin: Origin, source: Source) -> Origin:
    """`origin` with the sizes and preprocessing in force."""
    known = source.preprocessing
    size = None if source.folder or len(source.example_inputs[0].shape) != 4 else source.input_size
    return replace(
        origin,
        input_size=origin.input_size or size,
        labels=source.labels,
        **({} if known is None else {f: getattr(known, f) for f in ("mean", "std", "crop", "interpolation")}),
    )


def _from_module(model: nn.Module, checkpoint: str | None) -> Source:
    compiled = getattr(model, "_orig_mod", None)  # what torch.compile keeps of the module that it was given
    model = compiled if isinstance(compiled, nn.Module) else model
    name = type(model).__name__
    try:
        if checkpoint is not None or any(module.training for module in model.modules()):
            model = copy.deepcopy(model).eval()  # the caller's own stays as it is
    except Exception as error:  # what a module holds beside tensors may be no matter for copies
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{name} cannot be copied and put in evaluation mode ({why}): give model.eval()") from error
    if checkpoint is not None:
        load_checkpoint(model, _checkpoint_path(checkpoint, name))
    return Source(name, model, None, ())


def _from_program(program: ExportedProgram, name: str, checkpoint: str | None) -> Source:
    if checkpoint is not None:
        raise InputError(f"{name} is an exported program, whose weights are inside: it takes no --checkpoint")
    args, kwargs = program.example_inputs or ((), {})
    taken = [value for value in args or inputs_of(program) if isinstance(value, Tensor)]
    if kwargs or len(taken) != len(inputs_of(program)):
        raise InputError(f"{name} takes inputs other than tensors by position: export it with tensors alone")
    if not args:
        sizes = [[length if isinstance(length, int) else 2 for length in tensor.shape] for tensor in taken]
        taken = [torch.zeros(size, dtype=like.dtype) for size, like in zip(sizes, taken, strict=True)]
    return Source(name, None, program, tuple(taken))


def _from_spec(spec: str, checkpoint: str | None, size: Size | None) -> Source:
    path = as_path(spec)
    library, colon, name = spec.partition(":")
    if colon and library in LIBRARIES:
        return _from_library(library, name, checkpoint, size)
    if _is_factory(spec):
        return _from_factory(spec, checkpoint)
    if re.match(r"\w+://", spec):
        raise InputError(f"{spec} is an address: download the file first")
    if path.is_dir():
        return _from_folder(path, checkpoint)
    if path.suffix == ".pt2":
        origin = Origin(str(path.absolute()))
        program = _from_program(read_program(path), path.stem, checkpoint)
        return replace(program, origin=origin, code=code_digest(path))
    if path.suffix == ".onnx":
        return _from_onnx(path, checkpoint, size)
    if path.suffix in SUFFIXES:
        raise InputError(
            f"{path} holds weights, not a model: give the model (timm:NAME, file.py:factory) and --checkpoint {path}"
        )
    if colon and re.fullmatch(r"[\w-]+", library):
        raise unknown_name("kind of model", library, LIBRARIES)
    raise InputError(
        f"no model {spec!r}: give a .pt2 or .onnx file, a converted folder, "
        "file.py:factory, timm:NAME, torchvision:NAME or hf:FOLDER"
    )


def _from_library(library: str, name: str, checkpoint: str | None, size: Size | None) -> Source:
    if not name:
        raise InputError(f"{library}: needs a name after the colon")
    built = build(library, name, checkpoint, size)
    folder = as_path(name)
    spec = f"{library}:{folder.absolute() if library == 'hf' and folder.is_dir() else name}"
    return Source(
        name=folder.name,
        model=built.model.eval(),
        program=None,
        example_inputs=made_example(built.input_size) if built.input_size else (),
        preprocessing=built.preprocessing,
        origin=Origin(spec, _absolute(checkpoint), size),
        code=NO_CODE,
        labels=built.labels,
    )


def _from_folder(folder: Path, checkpoint: str | None) -> Source:
    if not os.path.isfile(folder / "model.pt2"):
        hint = f": a saved transformers model is given as hf:{folder}" if os.path.isfile(folder / "config.json") else ""
        raise InputError(f"{folder} is not a converted model, as it holds no model.pt2{hint}")
    source = _from_program(read_program(folder / "model.pt2"), folder.absolute().name, checkpoint)
    try:
        said = read_json(folder / "report.json")["source"]
        origin = None if said is None else TypeAdapter(Origin).validate_python(said)
    except (InputError, KeyError, TypeError, ValidationError) as error:
        raise InputError(f"{folder / 'report.json'} is missing or damaged: convert the model again") from error
    source = replace(source, origin=origin, folder=folder.absolute())
    return source if origin is None else replace(source, preprocessing=origin.preprocessing, labels=origin.labels)


def _from_onnx(path: Path, checkpoint: str | None, size: Size | None) -> Source:
    check_onnx(path, checkpoint)
    from attnrewrite.frontends.onnx.file import load_file

    loaded = load_file(path, size)
    origin = Origin(str(path.absolute()), input_size=size)
    lost = None if loaded.left_out is None else asdict(loaded.left_out)
    source = Source(path.stem, loaded.module, None, loaded.inputs, origin=origin, onnx_scan=loaded.scan, code=NO_CODE)
    return replace(source, left_out=lost)


def _is_factory(spec: str) -> bool:
    """Whether a name is that of a Python file, with or without a factory in it."""
    return re.search(r"\.py(:|$)", spec) is not None


def _from_factory(spec: str, checkpoint: str | None) -> Source:
    path, name, model = call_factory(spec)
    loaded = replace(_from_module(model, checkpoint), name=name, code=code_digest(path))
    return replace(loaded, origin=Origin(f"{path.absolute()}:{name}", _absolute(checkpoint)))


def _check_exported_for(source: Source, size: Size | None, *, given: bool) -> None:
    """Raise InputError where a program was exported for other images, or takes other inputs than those `given`."""
    assert source.program is not None
    first = source.example_inputs[0]
    known = tuple((source.program.example_inputs or ((first,), {}))[0][0].shape[1:])
    if size is not None and size != known:
        raise InputError(f"{source.name} was exported for images of {format_size(known)}, not {format_size(size)}")
    if given:
        require_runs(source.name, source.program.module(), source.example_inputs)


def _checkpoint_path(checkpoint: str, name: str) -> Path:
    if checkpoint == PRETRAINED:
        raise InputError(f"{name} has no published weights: give --checkpoint FILE")
    return as_path(checkpoint)


def _absolute(checkpoint: str | None) -> str | None:
    return checkpoint if checkpoint in (None, PRETRAINED) else str(as_path(checkpoint).absolute())
