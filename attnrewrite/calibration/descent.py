"""A site's own weights, where no closed form gives them: searched by descent towards what the site has to add to the
stream.

The rest of the network takes no part: a step costs the site alone, forwards and backwards, on a sample of its tokens.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnrewrite.calibration.projections import ROLES, TracedRead, TracedWrite
from attnrewrite.calibration.recorded import Recorded, recorder_for
from attnrewrite.calibration.train import Schedule
from attnrewrite.passes.site_module import ProjectedRead, ProjectedWrite, SiteModule
from attnrewrite.variants.base import Form
from attnrewrite.variants.parts.tensors import wide

TOKENS_HELD = 61_440  # of a site at a time: a search goes through its images in groups of so many tokens
CHECKED_SHARE = 8  # one image in so many is kept apart, to say whether a search has helped,
CHECKED_TOKENS = 12_288  # but no more tokens than these
FEW_TOKENS = 1_024  # are not searched with
TOKENS_AT_ONCE = 400  # of a step: smaller ones come no further, and cost more, image by image
ONCE = 300  # images come once each, and more as often as the square of how many times that they are,
MOST_TIMES = 8  # but no more often,
ENOUGH_SEEN = 368_640  # nor so often that more tokens than these are seen in all, but
LEAST_TIMES = 2  # as often as this: what a search costs grows with the images, as a forward pass does
RATE = 0.015  # of a tensor's own size, at most, that its elements change in a step
LEAST_SIZE = 0.1  # of what tensors have in the middle: one of zeros has that size
LEAST_GRADIENT = 1e-6  # of an error of about one: where rounding is all there is of it, nothing moves
SCALED_STEPS = 16  # whose rows say what the error is
FLATTENED = 0.5  # the power of what an image counts: else a few of a doubtful answer would be learnt by heart
TENSORS = 4  # query, key, value and what is wanted
INTERMEDIATE = 24  # times as much is held of a step

# why a site's weights stay as they were
TOO_FEW = "weights are not searched, as that takes more images"
NO_CLOSER = "weights were searched and are left, as they came no closer on other images"
UNTRACED = "projections of {} are not searched, as they serve others, too, or are not followed in the graph"


@dataclass(frozen=True)
class Sample:
    """What a site reads at some images, of which each is so many rows `per_image` (its windows), and what it should
    give there.

    Query, key and value: tokens [B, N, C] where the site projects them itself, else heads [B, H, N, d]. `bias` is as
    forms read it, `temperature` what projected queries are multiplied with, and `beside` what else the graph reads
    between the site and what is wanted. wanted [B, N, outputs]; what its tokens count [B, N] and, where they are not
    all alike, its outputs [outputs].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    bias: Tensor | None
    wanted: Tensor
    counts: Tensor
    per_image: int = 1
    outputs: Tensor | None = None
    temperature: Tensor | None = None
    beside: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.wanted.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those of each row: all but bias and temperature, which several may share, and what the outputs count."""
        own = self.query, self.key, self.value, self.wanted, self.counts
        return own if self.beside is None else (*own, self.beside)

    def rows(self, which: Tensor | slice) -> "Sample":
        """Some of the rows. A bias or temperature of one row is shared by all."""
        joined = [id(each) for each in (self.bias, self.temperature)]

        def own(part: Tensor | None) -> Tensor | None:
            if part is None or part is self.outputs or (id(part) in joined and len(part) == 1):
                return part
            return part[which]

        return self._mapped(own)

    def to(self, device: str) -> "Sample":
        return self._mapped(lambda part: None if part is None else part.to(device))

    def widened(self) -> "Sample":
        """In a precision to descend in."""
        return self._mapped(lambda part: None if part is None else wide(part))

    @property
    def distinct(self) -> list[Tensor]:
        """Its tensors, each once."""
        parts = {id(part): part for part in self._parts.values() if part is not None}
        return list(parts.values())

    def of(self, tensors: Sequence[Tensor]) -> "Sample":
        """The same of others, in the order of `distinct`."""
        others = {id(own): other for own, other in zip(self.distinct, tensors, strict=True)}
        return self._mapped(lambda part: None if part is None else others[id(part)])

    @property
    def _parts(self) -> dict[str, Tensor | None]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "per_image"}

    def _mapped(self, change: Callable[[Tensor | None], Tensor | None]) -> "Sample":
        """What is one tensor stays one."""
        parts = self._parts
        changed: dict[int, Any] = {}
        for part in parts.values():
            if id(part) not in changed:
                changed[id(part)] = change(part)
        return replace(self, **{name: changed[id(part)] for name, part in parts.items()})


def sampled(
    site: SiteModule,
    tensors: Iterable[Tensor],
    wanted: Tensor,
    counts: Tensor,
    images: int,
    outputs: Tensor | None = None,
) -> Sample:
    """What `site`, called with `tensors` of so many `images`, reads, beside what is wanted of it [B, N, outputs] and
    what its tokens and outputs count.
    """
    given = dict(zip(site.values, tensors, strict=True))
    tokens = _projected_tokens(site, given)
    rows = {len(each) for each in tokens.values()}
    if len(tokens) == len(ROLES) and len(rows) == 1:
        query, key, value = (tokens[role] for role in ROLES)
        bias = site.bias(given, len(query), query.dtype)
    else:
        *heads, bias = site.attend_inputs(*given.values())
        both = [(tokens.get(role), own) for role, own in zip(ROLES, heads, strict=True)]
        query, key, value = (own if each is None or len(each) != len(own) else each for each, own in both)
    temperature = site.temperature(given, len(query), query.dtype) if query.dim() == 3 else None  # heads have it
    beside = given[site.output.beside] if isinstance(site.output, TracedWrite) and site.output.beside else None
    return Sample(query, key, value, bias, wanted, counts, len(wanted) // images, outputs, temperature, beside)


def _projected_tokens(site: SiteModule, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tokens [B, N, C] of the roles whose heads are a projection of them alone; those of several are kept once."""
    read: dict[tuple[object, ...], Tensor] = {}
    views: dict[tuple[object, ...], Tensor] = {}  # the same tokens, which each reader lays out for itself
    found: dict[str, Tensor] = {}
    for role in ROLES:
        reader = getattr(site, role)
        if isinstance(reader, ProjectedRead | TracedRead) and reader.heads == site.heads:
            place = site.roles[role], reader.layout
            if place not in read:
                made = reader.tokens(given[site.roles[role]])
                read[place] = views.setdefault((made.data_ptr(), made.shape, made.stride()), made)
            found[role] = read[place]
    return found


def output(site: SiteModule, sample: Sample) -> Tensor:
    """What the site gives [B, N, outputs], before that is laid out as the graph has it."""
    parts = (sample.query, sample.key, sample.value)
    readers = (getattr(site, role) for role in ROLES)
    query, key, value = (
        part if part.dim() == 4 else reader.project(part) for reader, part in zip(readers, parts, strict=True)
    )
    query = query if sample.temperature is None else query * sample.temperature
    heads = site.form(query, key, value, sample.bias)
    if isinstance(site.output, TracedWrite):
        return site.output(heads, sample.beside)  # type: ignore[no-any-return]
    joined = heads.transpose(1, 2).flatten(2)
    return F.linear(joined, site.output.weight, site.output.bias) if isinstance(site.output, ProjectedWrite) else joined


def search(site: SiteModule, samples: Iterable[Sample], images: int, copies: int = 0) -> str | None:
    """Change the weights of the site's form and projections so that it gives what is wanted, by Adam on `samples`,
    which are of so many `images` and `copies` of them; the output projection, which has a closed form, stays.

    Returns why weights stay as they were: TOO_FEW or NO_CLOSER (on the last images, which are kept apart), where all
    do, or UNTRACED. The result does not depend on how the samples come in batches.
    """
    if not searched(site):
        return None
    stream = _Stream(samples)
    tokens, rows = stream.batch.tokens, stream.batch.per_image
    checked = min(max(1, images * rows // CHECKED_SHARE), max(1, CHECKED_TOKENS // tokens))
    own = images * rows - checked
    if own * tokens <= FEW_TOKENS:
        return TOO_FEW
    fitted = own + copies * rows
    size, held = (max(1, most // tokens) for most in (TOKENS_AT_ONCE, TOKENS_HELD))
    groups = [min(held, fitted - start) for start in range(0, fitted, held)]
    steps = [math.ceil(_times(images, own * tokens) * group / size) for group in groups]
    before, found = (copy.deepcopy(site).to(wide(stream.batch.wanted).dtype) for _ in range(2))
    descent = _Descent(found, Schedule(sum(steps), 1.0), size)
    for group, some in zip(groups, steps, strict=True):
        descent.through(stream.take(group), some)
    check = stream.take(checked)
    errors = [_error(each, check, size) for each in (before, found)]
    if errors[0] and not errors[1] < errors[0]:
        return NO_CLOSER
    with torch.no_grad():
        for parameter, better in zip(searched(site), searched(found), strict=True):
            parameter.copy_(better)
    heads = [role for role in _searched_roles(site) if getattr(check, role).dim() == 4]
    return UNTRACED.format(" and ".join(heads)) if heads else None


def _times(images: int, tokens: int) -> float:
    """How often a search sees each of so many `tokens` of `images`."""
    return min(max(1.0, (images / ONCE) ** 2), MOST_TIMES, max(LEAST_TIMES, ENOUGH_SEEN / tokens))


def searched(site: SiteModule) -> list[nn.Parameter]:
    """The weights that a search changes: those of the roles that all parts of the form name, and the form's own; no
    linear map of a form's result.
    """
    roles = _searched_roles(site)
    if not roles:
        return []
    closed = {own for form in _forms(site) for name in form.maps_after for own in form.get_submodule(name).parameters()}
    parts = *(getattr(site, role) for role in roles), site.form
    own = dict.fromkeys(parameter for part in parts for parameter in part.parameters())  # query and key may share one
    return [parameter for parameter in own if parameter not in closed]


def _searched_roles(site: SiteModule) -> list[str]:
    return [role for role in ROLES if all(role in form.searched for form in _forms(site))]


def _forms(site: SiteModule) -> list[Form]:
    return [part for part in site.form.modules() if isinstance(part, Form)]


def flattened(rows: Tensor, images: int) -> Tensor:
    """What tokens [B, N] of so many `images` count in a search, of what they count in a closed form: those of an image
    as much beside each other, as a class token may count more than all others, and images less unlike.
    """
    of_images = rows.reshape(images if len(rows) % images == 0 else 1, -1)  # learned tokens may be the same for all
    return (of_images * of_images.mean(1, keepdim=True).pow(FLATTENED - 1)).reshape_as(rows)


def held_bytes(width: int, tokens: int, images: int) -> int:
    """What a search holds at a site of so many channels that sees so many tokens of so many images in all: a group of
    them, those that check, and what is computed in a step.
    """
    step = max(TOKENS_AT_ONCE, tokens // max(1, images))
    return 4 * width * (TENSORS * min(tokens, TOKENS_HELD + CHECKED_TOKENS) + INTERMEDIATE * min(tokens, step))


class _Stream:
    """The images of samples that come in batches, taken in order, as many at a time as are asked for."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self.samples = iter(samples)
        self.batch = next(self.samples)

    def take(self, rows: int) -> Sample:
        """The next so many. Each batch is put in its place as it comes, as batches that wait would take twice the
        memory; what is one tensor in a batch is one of all.
        """
        first: list[int] = []
        whole: dict[int, Tensor] = {}
        joined: list[tuple[int, Tensor | None, Tensor | None]] = []
        done = 0
        while done < rows:
            if not len(self.batch.wanted):
                self.batch = next(self.samples)
            part = self.batch.rows(slice(rows - done))
            self.batch = self.batch.rows(slice(rows - done, None))
            if not whole:
                same = [id(own) for own in part.tensors]
                first = [same.index(each) for each in same]
                whole = {index: part.tensors[index].new_empty(rows, *part.tensors[index].shape[1:]) for index in first}
            for index, together in whole.items():
                together[done : done + len(part.wanted)] = part.tensors[index]
            joined.append((len(part.wanted), part.bias, part.temperature))
            done += len(part.wanted)
        query, key, value, wanted, counts, *beside = (whole[index] for index in first)
        images, *others = zip(*joined, strict=True)
        bias, temperature = (_of_all(each, images) for each in others)
        own = replace(part, wanted=wanted, counts=counts, beside=beside[0] if beside else None)
        return replace(own, query=query, key=key, value=value, bias=bias, temperature=temperature)


def _of_all(parts: Sequence[Tensor | None], images: Sequence[int]) -> Tensor | None:
    """The biases, or temperatures, of so many `images` each. One of one row that several share stays as it is."""
    given = [part for part in parts if part is not None]
    if not given:
        return None
    shared = any(len(part) == 1 < own for part, own in zip(given, images, strict=True))
    return given[0] if shared else torch.cat(given)


class _Descent:
    """Adam on what a search changes of `site`, along `schedule`, by so many rows (`size`) a step."""

    def __init__(self, site: SiteModule, schedule: Schedule, size: int) -> None:
        self.site, self.schedule, self.size = site, schedule, size
        site.requires_grad_(False)
        self.weights = _Flat(searched(site))
        scaled = self.weights.scaled
        self.recorder = recorder_for(scaled.device)
        # a tensor, as a number would be the same in all recorded steps; torch's kernels for GPUs read a float32
        precision = torch.float64 if scaled.device.type == "cpu" else torch.float32
        self.rate = torch.zeros((), dtype=precision, device=scaled.device)
        self.optimizer = torch.optim.Adam(
            [scaled], lr=self.rate, eps=LEAST_GRADIENT, fused=True, capturable=self.recorder is not None
        )
        self.done, self.scale = 0, 0.0

    def through(self, sample: Sample, steps: int) -> None:
        """So many `steps` on the rows of `sample`."""
        if not self.done:
            few = sample.rows(slice(SCALED_STEPS * self.size))
            self.scale = _error(self.site, few, self.size) / len(few.wanted) or 1.0
        step = Recorded(lambda *tensors: self._step(sample.of(tensors)), self.recorder)
        for rows in islice(_drawn(len(sample.wanted), self.size, sample.wanted.device), steps):
            self.rate.fill_(self.schedule.rate_at(self.done))
            step(*sample.rows(rows).distinct)
            self.done += 1

    def _step(self, part: Sample) -> None:
        self.weights.gradient.zero_()
        with torch.enable_grad():
            (_part(self.site, part) / (self.scale * len(part.wanted))).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.weights.put_back()


class _Flat:
    """Parameters as one tensor: as many small steps as there are here cost a step of many tensors more than its sums.

    `scaled` is what they are times their rates, so that a step of one changes each tensor by its own; `gradient` is
    theirs, as backward passes leave it, which Adam takes for that of `scaled` as its steps have no unit.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.values = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
        self.gradient = torch.zeros_like(self.values)
        parts = self.values.split(sizes), self.gradient.split(sizes)
        for parameter, value, gradient in zip(parameters, *parts, strict=True):
            parameter.requires_grad_(True)
            parameter.data, parameter.grad = value.view_as(parameter), gradient.view_as(parameter)
        rates = _rates(parameters)
        self.rates = torch.cat([self.values.new_full((size,), rate) for size, rate in zip(sizes, rates, strict=True)])
        self.scaled = nn.Parameter(self.values / self.rates)
        self.scaled.grad = self.gradient

    def put_back(self) -> None:
        """The parameters, as they are after a step."""
        torch.mul(self.scaled.detach(), self.rates, out=self.values)


def _rates(parameters: Sequence[nn.Parameter]) -> list[float]:
    """RATE of each tensor's root mean square."""
    sizes = torch.stack([parameter.detach().double().square().mean().sqrt() for parameter in parameters]).cpu()
    middle = sizes[sizes > 0].median() if bool(sizes.any()) else torch.ones(())
    return [float(size) for size in RATE * sizes.clamp(min=LEAST_SIZE * float(middle))]


def _drawn(count: int, size: int, device: torch.device) -> Iterator[Tensor | slice]:
    """The images of each step: all of them, again and again, each time in another order. One alone is not copied."""
    generator = torch.Generator().manual_seed(0)
    while True:
        order = torch.randperm(count, generator=generator)
        if size == 1:
            yield from (slice(row, row + 1) for row in order.tolist())
        else:
            yield from order.to(device).split(size)


def _error(site: SiteModule, sample: Sample, size: int) -> float:
    starts = range(0, len(sample.wanted), size)
    with torch.no_grad():
        parts = [_part(site, sample.rows(slice(start, start + size))) for start in starts]
    return float(torch.stack(parts).double().sum())


def _part(site: SiteModule, sample: Sample) -> Tensor:
    part = sample.widened()
    squares = (output(site, part) - part.wanted).square()
    of_tokens = squares.sum(2) if part.outputs is None else squares @ part.outputs.to(squares.dtype)
    return (of_tokens * part.counts).sum()
