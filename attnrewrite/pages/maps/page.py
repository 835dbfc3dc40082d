"""The page of `explain --image`: every site's maps laid over the picture, before and after conversion."""

import base64
import io
from dataclasses import dataclass

import numpy as np
from PIL import Image

from attnrewrite.pages.maps.image_maps import FormMaps, ImageMaps, SiteMaps, TokenMap
from attnrewrite.pages.render import render

# Dark to bright, with lightness that only rises: the same order on any screen and for any eye.
_COLOURS = np.array([(8, 6, 48), (84, 16, 110), (170, 44, 96), (232, 104, 40), (252, 184, 60), (252, 255, 190)], float)
_LEAST_PICTURE = 224  # pixels of the shown picture's longer side


@dataclass(frozen=True)
class Overlay:
    """One heat map as a data URI, and the numbers at its ends. `before` are those of tokens before the image's."""

    title: str
    uri: str
    low: float
    high: float
    before: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One map of a form: the mean over its heads, and each head's where there are several."""

    title: str
    mean: Overlay
    heads: tuple[Overlay, ...]


@dataclass(frozen=True)
class Side:
    """What stands at a site: `label` is "before" or "after"."""

    label: str
    form: str
    rows: tuple[Row, ...]
    reason: str | None


def maps_page(found: ImageMaps) -> str:
    """The page, self-contained HTML. Raises InputError where jinja2 is not installed."""
    shown = [each for each in found.sites if each.before.maps or (each.after and each.after.maps)]
    picture = Image.fromarray(found.pixels[..., 0] if found.pixels.shape[2] == 1 else found.pixels)
    times = max(1, round(_LEAST_PICTURE / max(picture.size)))
    picture = picture.resize((picture.width * times, picture.height * times), Image.Resampling.NEAREST)
    return render(
        "maps.html.jinja",
        {"number": number},
        model=found.model,
        image=found.image,
        photo=_uri(picture),
        aspect=f"{picture.width} / {picture.height}",
        sites=[(each.site, _sides(each)) for each in shown],
        without=[(each.site, each.before.reason) for each in found.sites if each not in shown],
        converted=any(each.after for each in found.sites),
    )


def _sides(found: SiteMaps) -> list[Side]:
    sides = [_side("before" if found.after else "", found.before)]
    return sides if found.after is None else [*sides, _side("after", found.after)]


def _side(label: str, found: FormMaps) -> Side:
    return Side(label, found.form, tuple(_row(each) for each in found.maps), found.reason)


def _row(found: TokenMap) -> Row:
    count = len(found.image)
    mean = overlay("mean of the heads" if count > 1 else "", found.image.mean(0), found.prefix.mean(0))
    heads = (overlay(f"head {n}", found.image[n], found.prefix[n]) for n in range(count)) if count > 1 else ()
    return Row(found.title, mean, tuple(heads))


def overlay(title: str, image: np.ndarray, before: np.ndarray) -> Overlay:
    """A map [rows, columns] in colours, from zero (or its least, where that is below zero) to its largest."""
    low, high = min(0.0, float(image.min())), float(image.max())
    share = np.clip((image - low) / ((high - low) or 1.0), 0, 1) * (len(_COLOURS) - 1)
    channels = [np.interp(share, range(len(_COLOURS)), _COLOURS[:, channel]) for channel in range(3)]
    pixels = np.stack(channels, axis=2).round().astype(np.uint8)
    return Overlay(title, _uri(Image.fromarray(pixels)), low, high, tuple(float(each) for each in before))


def number(value: float) -> str:
    return f"{value:.3g}"


def _uri(picture: Image.Image) -> str:
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
