"""Whether softmax re-emitted at every site of a model is its attention, as one value or one error."""

from collections.abc import Sequence

from torch.fx import GraphModule

from attnrewrite.errors import CheckFailedError
from attnrewrite.passes.draws import Draw
from attnrewrite.passes.verify import Run, compared_values, site_errors
from attnrewrite.passes.wide import Recording
from attnrewrite.site import Scan


def identity_errors(
    original: GraphModule, identity: GraphModule, scan: Scan, draws: Sequence[Draw]
) -> dict[str, float]:
    """The largest error of each site on any of `draws`. Raises CheckFailedError where that is a fault."""
    recording = Recording(original, compared_values(identity, scan))
    found = site_errors(original, identity, scan, [Run.of(recording, draw) for draw in draws])
    for site, each in found.items():
        if each.fault is not None:
            raise CheckFailedError(each.fault, site=site)
    return {site: each.error for site, each in found.items()}
