"""A site's own weights, where no closed form gives them: searched by descent towards what the site has to add to the
stream.

The rest of the network takes no part: a step costs the site alone, forwards and backwards, on a sample of its tokens.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.calibration.train import Schedule
from attnrewrite.passes.site_module import ProjectedRead, ProjectedWrite, SiteModule, tokens_of
from attnrewrite.variants.base import Form
from attnrewrite.variants.parts.tensors import wide

MOST_TOKENS = 61_440  # are searched with,
MOST_SEEN = 6 * MOST_TOKENS  # all times together: a search costs no more, however many images there are
CHECKED_TOKENS = 12_288  # others, which say whether a search has helped
FEW_TOKENS = 1_024  # are not searched with
TOKENS_AT_ONCE = 256  # of a step: many small ones come further than as many tokens in few
ONCE = 300  # images come once each, and more as often as the square of how many times that they are,
MOST_TIMES = 8  # but no more often
RATE = 0.015  # of a tensor's own size, at most, that its elements change in a step
LEAST_SIZE = 0.1  # of what tensors have in the middle: one of zeros has that size
LEAST_GRADIENT = 1e-6  # of an error of about one: where rounding is all there is of it, nothing moves
FLATTENED = 0.5  # the power of what tokens count: else a few images of a doubtful answer would be learnt by heart
TENSORS = 4  # query, key, value and what is wanted
INTERMEDIATE = 24  # times as much is held of a step

ROLES = ("query", "key", "value")

# why a site's weights stay as they were
TOO_FEW = "weights are not searched, as that takes more images"
NO_CLOSER = "weights were searched and are left, as they came no closer on other images"


@dataclass(frozen=True)
class Sample:
    """What a site reads at some images (or windows), and what it should give there.

    Query, key and value: tokens [B, N, C] where the site projects them itself, else heads [B, H, N, d]. `bias` is as
    forms read it. wanted [B, N, outputs], and what it counts [B, N].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    wanted: Tensor
    counts: Tensor

    @property
    def tokens(self) -> int:
        return self.wanted.shape[1]

    def rows(self, which: Tensor | slice) -> "Sample":
        """Some of the images. A bias of one row is shared by all."""

        def own(part: Tensor | None) -> Tensor | None:
            return part if part is None or (part is self.bias and len(part) == 1) else part[which]

        return self._mapped(own)

    def widened(self) -> "Sample":
        """In a precision to descend in."""
        return self._mapped(lambda part: None if part is None else wide(part))

    def _mapped(self, change: Callable[[Tensor | None], Tensor | None]) -> "Sample":
        parts: dict[str, Any] = {each.name: change(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **parts)


def sampled(site: SiteModule, tensors: Iterable[Tensor], wanted: Tensor, counts: Tensor) -> Sample:
    """What `site`, called with `tensors`, reads, beside what is wanted of it [B, N, outputs] and what that counts."""
    given = dict(zip(site.values, tensors, strict=True))
    heads = site.attend_inputs(*given.values())
    read: dict[tuple[object, ...], Tensor] = {}  # query, key and value are mostly of the same tokens: kept once
    parts = []
    for role, own in zip(ROLES, heads[:3], strict=True):
        reader, part = getattr(site, role), own
        if isinstance(reader, ProjectedRead) and site.core.temperature is None and own.shape[1] == reader.heads:
            tokens = tokens_of(given[site.roles[role]], reader.layout)
            if len(tokens) == len(own):
                part = read.setdefault((site.roles[role], reader.layout), tokens)
        parts.append(part)
    query, key, value = parts
    return Sample(query, key, value, heads[3], wanted, counts)


def output(site: SiteModule, sample: Sample) -> Tensor:
    """What the site gives [B, N, outputs], before that is laid out as the graph has it."""
    parts = (sample.query, sample.key, sample.value)
    readers = (getattr(site, role) for role in ROLES)
    heads = (part if part.dim() == 4 else reader.project(part) for reader, part in zip(readers, parts, strict=True))
    joined = site.form(*heads, sample.bias).transpose(1, 2).flatten(2)
    return F.linear(joined, site.output.weight, site.output.bias) if isinstance(site.output, ProjectedWrite) else joined


def search(site: SiteModule, samples: Iterable[Sample], images: int) -> str | None:
    """Change the weights of the site's form and projections so that it gives what is wanted, by Adam on the first
    MOST_TOKENS of `samples`, which are of so many `images` in all; the output projection, which has a closed form,
    stays.

    Where that is no closer on the CHECKED_TOKENS after them, all is left as it was, and the reason returned: TOO_FEW or
    NO_CLOSER. The result does not depend on how the samples come in batches.
    """
    if not searched(site):
        return None
    sample = _joined(samples)
    size = max(1, TOKENS_AT_ONCE // sample.tokens)
    count = len(sample.wanted) * MOST_TOKENS // (MOST_TOKENS + CHECKED_TOKENS)
    if count <= max(1, FEW_TOKENS // sample.tokens):
        return TOO_FEW
    fitted, checked = sample.rows(slice(count)), sample.rows(slice(count, None)).widened()
    found = copy.deepcopy(site).to(checked.wanted.dtype)
    before = _error(found, checked, size)
    if before == 0:
        return None
    times = min(MOST_TIMES, max(1.0, (images / ONCE) ** 2))
    seen = min(times * count, MOST_SEEN / sample.tokens)
    _descend(found, fitted, math.ceil(seen / size), size, before / len(checked.wanted))
    if not _error(found, checked, size) < before:
        return NO_CLOSER
    with torch.no_grad():
        for parameter, better in zip(searched(site), searched(found), strict=True):
            parameter.copy_(better)
    return None


def searched(site: SiteModule) -> list[nn.Parameter]:
    """The weights that a search changes: none, where any part of the form keeps softmax's scores; no linear map of a
    form's result, either.
    """
    forms = [part for part in site.form.modules() if isinstance(part, Form)]
    if any(form.keeps_scores for form in forms):
        return []
    closed = {own for form in forms for name in form.maps_after for own in form.get_submodule(name).parameters()}
    parts = (site.query, site.key, site.value, site.form)
    return [parameter for part in parts for parameter in part.parameters() if parameter not in closed]


def held_bytes(width: int, tokens: int, images: int) -> int:
    """What a search holds at a site of so many channels that sees so many tokens of so many images in all: its sample,
    and what is computed in a step.
    """
    step = max(TOKENS_AT_ONCE, tokens // max(1, images))
    return 4 * width * (TENSORS * min(tokens, MOST_TOKENS + CHECKED_TOKENS) + INTERMEDIATE * min(tokens, step))


def _joined(samples: Iterable[Sample]) -> Sample:
    """The first tokens of `samples`, of whole images: each is put in its place as it comes, as pieces that wait would
    take twice the memory.
    """
    whole: list[Tensor] = []  # what is one tensor in the samples is one of all of them
    biases: list[tuple[Tensor | None, int]] = []
    rows = 0
    for sample in samples:
        most = max(1, (MOST_TOKENS + CHECKED_TOKENS) // sample.tokens)
        part = sample.rows(slice(most - rows))
        read = {_place(own): own for own in (part.query, part.key, part.value, part.wanted, part.counts)}
        whole = whole or [own.new_empty(most, *own.shape[1:]) for own in read.values()]
        for together, own in zip(whole, read.values(), strict=True):
            together[rows : rows + len(own)] = own
        biases.append((part.bias, len(part.wanted)))
        rows += len(part.wanted)
        if rows == most:
            break
    places = dict(zip(read, (together[:rows] for together in whole), strict=True))
    query, key, value, wanted, counts = (
        places[_place(own)] for own in (part.query, part.key, part.value, part.wanted, part.counts)
    )
    return Sample(query, key, value, _joined_bias(biases), wanted, counts)


def _place(tensor: Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _joined_bias(given: list[tuple[Tensor | None, int]]) -> Tensor | None:
    """The biases of so many images each. One of one row that several share stays as it is."""
    biases = [bias for bias, _ in given if bias is not None]
    if not biases:
        return None
    shared = any(len(bias) == 1 < images for bias, (_, images) in zip(biases, given, strict=True))
    return biases[0] if shared else torch.cat(biases)


def _descend(site: SiteModule, sample: Sample, steps: int, size: int, scale: float) -> None:
    """So many `steps` of `size` images each; an image's error is of the order of `scale`."""
    parameters = searched(site)
    site.requires_grad_(False)
    for parameter in parameters:
        parameter.requires_grad_(True)
    rates = _rates(parameters)
    groups = [{"params": [parameter]} for parameter in parameters]
    optimizer = torch.optim.Adam(groups, eps=LEAST_GRADIENT)
    schedule = Schedule(steps, 1.0)
    with torch.enable_grad():
        for step, rows in enumerate(islice(_drawn(len(sample.wanted), size), steps)):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * schedule.rate_at(step)
            optimizer.zero_grad()
            error = _part(site, sample.rows(rows.to(sample.wanted.device)).widened())
            (error / (scale * len(rows))).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _rates(parameters: list[nn.Parameter]) -> list[float]:
    """RATE of each tensor's root mean square."""
    sizes = torch.stack([parameter.detach().double().square().mean().sqrt() for parameter in parameters]).cpu()
    middle = sizes[sizes > 0].median() if bool(sizes.any()) else torch.ones(())
    return [float(size) for size in RATE * sizes.clamp(min=LEAST_SIZE * float(middle))]


def _drawn(count: int, size: int) -> Iterator[Tensor]:
    """The images of each step: all of them, again and again, each time in another order."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).split(size)


def _error(site: SiteModule, sample: Sample, size: int) -> float:
    starts = range(0, len(sample.wanted), size)
    with torch.no_grad():
        return math.fsum(float(_part(site, sample.rows(slice(start, start + size)))) for start in starts)


def _part(site: SiteModule, sample: Sample) -> Tensor:
    return ((output(site, sample) - sample.wanted).square().sum(2) * sample.counts).sum()
