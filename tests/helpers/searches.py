"""A site of a small model by itself, and tokens for it: what a search of its weights is tried on."""

from collections.abc import Iterator
from typing import Any

import torch
from fits import calibration

from attnrewrite.calibration.descent import Sample, output, sampled
from attnrewrite.passes.site_module import SiteModule
from attnrewrite.passes.verify import rewritten_sites
from attnrewrite.variants.registry import get_variant

IMAGES = 800


def first_site(form: str = "l1", kind: str = "pre-norm", **options: Any) -> tuple[SiteModule, SiteModule]:
    """The student's and the teacher's, in float64."""
    given = calibration(kind, get_variant(form, options))
    student, teacher = (next(iter(rewritten_sites(each).values())) for each in (given.student, given.teacher))
    return student.double(), teacher.double()


@torch.no_grad()
def samples(site: SiteModule, teacher: SiteModule, size: int = IMAGES, seed: int = 0) -> Iterator[Sample]:
    """What the teacher gives for tokens of 5 directions, in batches of so many images."""
    generator = torch.Generator().manual_seed(seed)
    tokens, mixing = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((IMAGES, 36, 5), (5, 8))
    )
    for part in (tokens @ mixing).split(size):
        sample = sampled(teacher, (part,), part, part.new_ones(part.shape[:2]), len(part))
        yield sampled(site, (part,), output(teacher, sample), sample.counts, len(part))
