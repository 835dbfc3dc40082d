"""Models that timm, torchvision and transformers build by name.

Nothing is fetched from the network unless `checkpoint` is "pretrained". Without a checkpoint the weights are random,
drawn from a fixed seed so that the same name is the same model again, and a note says so.
"""

import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from attnrewrite.errors import AttnRewriteError, InputError, first_line, unknown_name
from attnrewrite.files import as_path
from attnrewrite.frontends.checkpoints import load_checkpoint
from attnrewrite.frontends.torchvision import import_torchvision
from attnrewrite.images.preprocessing import Preprocessing, Size, format_size

PRETRAINED = "pretrained"
log = logging.getLogger("attnrewrite")


@dataclass(frozen=True)
class Built:
    """A model, and what its own configuration says about its input, and of its classes where it names them."""

    model: nn.Module
    input_size: Size | None
    preprocessing: Preprocessing | None
    labels: tuple[str, ...] | None = None


@contextmanager
def fixed_seed() -> Iterator[None]:
    """Random weights drawn inside are the same every time; the caller's random state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def build(library: str, name: str, checkpoint: str | None, size: Size | None) -> Built:
    """The model `name` of `library` (a key of LIBRARIES), for inputs of `size` (None: its own), with its weights.

    Raises:
        InputError: there is no such model, or the library does not build it, for whatever reason of its own.
    """
    try:
        with fixed_seed():
            return LIBRARIES[library](name, checkpoint, size)
    except AttnRewriteError:
        raise
    except Exception as error:
        sized = "" if size is None else f" for an input of {format_size(size)}"
        why = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(
            f"{library} does not build {name}{sized} ({why}): give another --input-size, or none"
        ) from error


def _timm(name: str, checkpoint: str | None, size: Size | None) -> Built:
    import_torchvision()
    timm = _require("timm", f"timm:{name}")
    if not timm.is_model(name):
        raise unknown_name("timm model", name, timm.list_models())
    channels = {} if size is None else {"in_chans": size[0]}
    with _weights_of(f"timm:{name}", offline=False):
        model = timm.create_model(name, pretrained=checkpoint == PRETRAINED, **channels)
    config = timm.data.resolve_model_data_config(model)
    known: Size = config["input_size"]
    if size is not None and size[1:] != known[1:] and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=size[1:])
    _load(model, checkpoint, f"timm:{name}")
    preprocessing = Preprocessing(config["mean"], config["std"], config["crop_pct"], config["interpolation"])
    return Built(model, size or known, preprocessing)


def _torchvision(name: str, checkpoint: str | None, size: Size | None) -> Built:
    models = (import_torchvision() or _require("torchvision", f"torchvision:{name}")).models
    if name not in (known := models.list_models(module=models)):
        raise unknown_name("torchvision model", name, known)
    weights = models.get_model_weights(name).DEFAULT
    transform = weights.transforms()
    side = transform.crop_size[0]
    chosen = weights if checkpoint == PRETRAINED else None
    with _weights_of(f"torchvision:{name}", offline=False):
        model = models.get_model(name, weights=chosen)
        if size is not None and size[1] != getattr(model, "image_size", size[1]):  # a ViT is built for one size
            model = models.get_model(name, weights=chosen, image_size=size[1])
    _load(model, checkpoint, f"torchvision:{name}")
    preprocessing = Preprocessing(
        tuple(transform.mean), tuple(transform.std), side / transform.resize_size[0], transform.interpolation.value
    )
    return Built(model, size or (3, side, side), preprocessing)


def _hugging_face(name: str, checkpoint: str | None, size: Size | None) -> Built:
    """`name` is a folder with config.json (and model.safetensors), or a model of the Hugging Face hub.

    Without `checkpoint`, weights come from the folder or from the local cache of the hub.
    """
    import_torchvision()
    transformers = _require("transformers", f"hf:{name}")
    folder = as_path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise InputError(f"hf:{name}: the folder has no config.json, so it is not a saved transformers model")
    place = str(folder) if folder.is_dir() else name
    offline = folder.is_dir() or checkpoint != PRETRAINED
    with _weights_of(name=f"hf:{name}", offline=offline):
        config = transformers.AutoConfig.from_pretrained(place, local_files_only=offline)
    if size is not None:
        config.num_channels = size[0]
        in_pairs = isinstance(getattr(config, "image_size", None), list | tuple)  # and read as such by the model
        config.image_size = list(size[1:]) if in_pairs or size[1] != size[2] else size[1]
    kind = _hf_class(transformers, config, name)
    has_weights = not folder.is_dir() or any(folder.glob("*.safetensors"))
    if has_weights and checkpoint in (None, PRETRAINED):
        with _weights_of(name=f"hf:{name}", offline=offline):
            model, loading = kind.from_pretrained(
                place,
                config=config,
                local_files_only=offline,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, all in one line
                output_loading_info=True,
            )
        _check_loaded(loading, f"hf:{name}")
    else:
        model = kind(config)
        _load(model, checkpoint, f"hf:{name}")
    preprocessing = _hf_preprocessing(transformers, place, offline)
    return Built(TensorOutputs(model), size or _hf_size(config), preprocessing, _hf_labels(kind, config))


class TensorOutputs(nn.Module):
    """A transformers model as a function of pixels: returns its output's tensors alone, a tuple if several."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor | tuple[Tensor, ...]:
        """[B, C, H, W] -> the logits of a classifier; hidden states and what is pooled from them otherwise."""
        values = pytree.tree_leaves(dict(self.model(pixel_values=pixel_values)))
        tensors = tuple(value for value in values if isinstance(value, Tensor))
        return tensors[0] if len(tensors) == 1 else tensors


def _hf_class(transformers: ModuleType, config: Any, name: str) -> Any:
    """The class that the configuration names, or else the image classifier or plain model of its type."""
    if config.architectures:
        kind = getattr(transformers, config.architectures[0], None)
        if kind is None:
            raise InputError(
                f"hf:{name} is a {config.architectures[0]}, which transformers {transformers.__version__} "
                "does not have: update transformers, or build the model in your own file.py:factory"
            )
        return kind
    classifiers, models = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, transformers.MODEL_MAPPING
    return classifiers[type(config)] if type(config) in classifiers else models[type(config)]


def _hf_size(config: Any) -> Size | None:
    side = getattr(config, "image_size", None)
    if side is None:
        return None
    height, width = (side, side) if isinstance(side, int) else side
    return getattr(config, "num_channels", 3), height, width


def _hf_labels(kind: type, config: Any) -> tuple[str, ...] | None:
    """The names of a classifier's classes; None where the configuration has but numbers for them."""
    names = tuple(str(config.id2label[place]) for place in sorted(config.id2label))
    unnamed = names == tuple(f"LABEL_{place}" for place in range(len(names)))
    return None if unnamed or not kind.__name__.endswith("ForImageClassification") else names


def _hf_preprocessing(transformers: ModuleType, place: str, offline: bool) -> Preprocessing | None:
    """What preprocessor_config.json says, or None where there is none."""
    try:
        path = transformers.utils.cached_file(place, "preprocessor_config.json", local_files_only=offline)
    except OSError:
        return None
    said = json.loads(Path(path).read_text())
    factor = 255 * said.get("rescale_factor", 1 / 255) if said.get("do_rescale", True) else 255
    normalize = said.get("do_normalize", True)
    mean, std = (said["image_mean"], said["image_std"]) if normalize else ([0.0], [1.0])
    edge, crop = (_hf_side(said.get(key)) for key in ("size", "crop_size"))
    return Preprocessing(
        mean=tuple(value / factor for value in mean),
        std=tuple(value / factor for value in std),
        crop=crop / edge if said.get("do_center_crop") and edge and crop else 1.0,
        interpolation=PIL_FILTERS.get(said.get("resample"), "bicubic"),
    )


def _hf_side(size: Any) -> int | None:
    return size.get("shortest_edge", size.get("height")) if isinstance(size, dict) else size


def _check_loaded(loaded: dict[str, Any], name: str) -> None:
    problems = [
        f"{len(loaded[key])} {what} ({', '.join(_first_names(loaded[key]))})"
        for key, what in (
            ("missing_keys", "missing"),
            ("unexpected_keys", "unexpected"),
            ("mismatched_keys", "of another shape"),
        )
        if loaded[key]
    ]
    if problems:
        raise InputError(f"{name}: its weights do not fit its configuration: {'; '.join(problems)}")


def _first_names(keys: Iterable[Any]) -> list[str]:
    """The first three names; a key of another shape comes as (name, shapes)."""
    return sorted(str(key if isinstance(key, str) else key[0]) for key in keys)[:3]


def _load(model: nn.Module, checkpoint: str | None, name: str) -> None:
    if checkpoint is None:
        log.warning("%s has random weights: give --checkpoint FILE, or --checkpoint pretrained to download them", name)
    elif checkpoint != PRETRAINED:
        load_checkpoint(model, as_path(checkpoint))


@contextmanager
def _weights_of(name: str, *, offline: bool) -> Iterator[None]:
    """Say in one line that what the library looked for is not there, whatever it raised."""
    try:
        yield
    except AttnRewriteError:
        raise
    except Exception as error:  # each library and each network failure has its own class
        reason = first_line(error).rstrip(".")
        way_out = (
            "give a folder with config.json and model.safetensors, or --checkpoint pretrained to download it"
            if offline
            else "where there is no network, download the file elsewhere and give --checkpoint FILE"
        )
        raise InputError(f"{name} could not be loaded ({reason}): {way_out}") from error


def _require(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise InputError(
            f'{name} needs {package}, which is not installed: pip install "attnrewrite[models]"'
        ) from error


PIL_FILTERS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
LIBRARIES: dict[str, Callable[[str, str | None, Size | None], Built]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "hf": _hugging_face,
}
