"""A form's own maps, where no closed form gives them: searched by descent on heads that the teacher has at its site,
towards what softmax makes of the same.

The rest of the network takes no part: a step costs the form alone, forwards and backwards, on a sample of the tokens.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from attnrewrite.variants.base import Form, Heads
from attnrewrite.variants.parts.tensors import wide

ONE_IMAGE_IN = 10  # is searched with: a search costs no more beside a forward pass, however many images there are,
MOST_TOKENS = 16_384  # and no more than so many tokens
CHECKED_TOKENS = 4_096  # others, which say whether a search has helped
TOKENS_AT_ONCE = 512  # whose intermediate results are held
STEPS = 40  # of L-BFGS
TENSORS = 5  # query, key, value, softmax's output, and one to spare
INTERMEDIATE = 10  # times as much is held of a part to descend in

Sample = tuple[Heads, Tensor]  # what a form reads, and what softmax makes of it [B, H, N, e]


def search(form: Form, softmax: Form, heads: Iterable[Heads]) -> bool:
    """Change the parameters that `form` names in `searched` so that it gives what `softmax` gives, by L-BFGS (Liu and
    Nocedal 1989) on the first MOST_TOKENS of `heads`: the squared error of each head's output over its variance.

    Where it is no closer on the CHECKED_TOKENS after them, the parameters are left as they are. The result does not
    depend on how `heads` come in batches. False: there are too few tokens to search with and to check.
    """
    if not form.searched():
        return True
    samples = list(_samples(heads, softmax))
    fitted = samples[: max(1, len(samples) * MOST_TOKENS // (MOST_TOKENS + CHECKED_TOKENS))]
    checked = samples[len(fitted) :]
    if not checked:
        return False
    start = copy.deepcopy(form).to(torch.promote_types(form.searched()[0].dtype, torch.float32))
    found = copy.deepcopy(start)
    _descend(found, fitted)
    with torch.no_grad():
        if _error(found, checked) < _error(start, checked):
            for parameter, better in zip(form.searched(), found.searched(), strict=True):
                parameter.copy_(better)
    return True


def held_bytes(width: int, tokens: int) -> int:
    """What a search holds at a site of so many channels that sees so many tokens in all: its sample, and what is
    computed of a part of it. Nothing is searched with less than a part.
    """
    sample = min(tokens, MOST_TOKENS + CHECKED_TOKENS) + INTERMEDIATE * TOKENS_AT_ONCE
    return 4 * width * TENSORS * sample if tokens >= TOKENS_AT_ONCE else 0


def _samples(heads: Iterable[Heads], softmax: Form) -> Iterator[Sample]:
    """The first tokens of `heads`, in parts of as many whole images (or windows) as TOKENS_AT_ONCE has room for."""
    waiting: list[Heads] = []
    tokens = 0
    for batch in heads:
        queries = batch.query.shape[2]
        waiting.append(batch)
        size = max(1, TOKENS_AT_ONCE // queries)
        while sum(len(each.query) for each in waiting) >= size:
            whole = _joined(waiting)
            part, rest = _widened(first_rows(whole, size)), _rows(whole, slice(size, None))
            waiting = [rest]
            with torch.no_grad():
                yield part, softmax(*part)
            tokens += size * queries
            if tokens >= MOST_TOKENS + CHECKED_TOKENS:
                return


def _joined(batches: Sequence[Heads]) -> Heads:
    """Batches one after the other. A bias of one row that several images share stays as it is."""
    if len(batches) == 1:
        return batches[0]
    query, key, value = (torch.cat([getattr(each, role) for each in batches]) for role in ("query", "key", "value"))
    biases = [each.bias for each in batches if each.bias is not None]
    if not biases:
        return Heads(query, key, value)
    shared = any(len(each.query) > 1 and each.bias is not None and len(each.bias) == 1 for each in batches)
    return Heads(query, key, value, biases[0] if shared else torch.cat(biases))


def first_rows(heads: Heads, count: int) -> Heads:
    """The heads of the first `count` images (or windows)."""
    return _rows(heads, slice(0, count))


def _rows(heads: Heads, rows: slice) -> Heads:
    bias = heads.bias if heads.bias is None or len(heads.bias) == 1 else heads.bias[rows]
    return Heads(heads.query[rows], heads.key[rows], heads.value[rows], bias)


def _widened(heads: Heads) -> Heads:
    """In a precision to descend in."""
    return Heads(*(None if part is None else wide(part) for part in heads))  # type: ignore[arg-type]


def _variances(samples: Sequence[Sample]) -> Tensor:
    """The squared distance of softmax's outputs from their mean, for each head [H]."""
    count = sum(len(wanted) * wanted.shape[2] for _, wanted in samples)
    mean = torch.stack([wanted.double().sum((0, 2)) for _, wanted in samples]).sum(0) / count
    parts = [(wanted - mean.unsqueeze(1)).square().sum((0, 2, 3)) for _, wanted in samples]
    return torch.stack(parts).sum(0).clamp(min=torch.finfo(torch.float32).tiny)


def _error(form: Form, samples: Sequence[Sample]) -> float:
    variances = _variances(samples)
    return math.fsum(float(_part(form, sample, variances)) for sample in samples)


def _part(form: Form, sample: Sample, variances: Tensor) -> Tensor:
    heads, wanted = sample
    return ((form(*heads) - wanted).square().sum((0, 2, 3)) / variances).sum()


def _descend(form: Form, samples: Sequence[Sample]) -> None:
    variances = _variances(samples)
    optimizer = torch.optim.LBFGS(form.searched(), max_iter=STEPS, history_size=STEPS, line_search_fn="strong_wolfe")

    def error() -> float:
        optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            part = _part(form, sample, variances)
            part.backward()  # type: ignore[no-untyped-call]
            total += float(part.detach())
        return total

    with torch.enable_grad():
        optimizer.step(error)
