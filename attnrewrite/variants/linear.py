"""What every linear form's variant shares: the sites it refuses, exact prefix rows, the local branch, the count."""

from dataclasses import dataclass, replace
from typing import ClassVar

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.base import Form, Variant, as_refusal, refuse_unless_plain
from attnrewrite.variants.parts.bias_factors import MOST_PAIRS, BiasFactors
from attnrewrite.variants.parts.exact_prefix import ExactPrefix
from attnrewrite.variants.parts.local_branch import LocalBranch
from attnrewrite.variants.parts.tensors import image_grid, prefix_queries, score_scale
from attnrewrite.variants.parts.value_mean import ValueMean
from attnrewrite.variants.softmax import Softmax

DROPPABLE = {
    "constant": Refusal("constant-bias", "adds a constant bias to its scores"),
    "depends-on-query": Refusal("bias-depends-on-query", "adds a bias that depends on the query"),
}


@dataclass(frozen=True, kw_only=True)
class LinearVariant(Variant):
    """A form of O(N) cost. Subclasses give `form` (the bare form), `form_multiplies` and, where needed, `refuse_form`.

    exact_prefix: class and register tokens keep exact softmax rows, where there are such tokens; so does a query that
    is alone, as where a class token attends to all others: it has no others that a form could take means over, and
    softmax costs no more.
    local: a depthwise 3x3 branch on the value beside the form.
    approximate: stand at a site whose scores carry a bias, though no form of O(N) cost can add it to them.
    bias_rank: of the factors by which calibration then keeps what the bias does on average, a quarter of the tokens at
    most; 0 leaves it out.
    grid: what the tokens are where the graph does not tell, such as 14x14+1 (one token before the image).
    """

    exact_prefix: bool = True
    local: bool = False
    approximate: bool = False
    bias_rank: int = 8
    grid: str | None = None

    approximation: ClassVar[str] = "keeps a part of it"
    left_out: ClassVar[str] = "the {bias} bias on the scores is left out"
    # The form's refusal of a mask on the keys; None where it weighs keys (parts.key_masks.key_weights)
    no_key_bias: ClassVar[Refusal | None] = Refusal("keys-not-weighed", "has no weights for its keys")

    def __post_init__(self) -> None:
        if self.bias_rank < 0:
            raise InputError(f"{self.name}: bias_rank={self.bias_rank} must be at least 1, or 0 to leave a bias out")
        if self.grid is not None:
            Grid.parse(self.grid)

    def form(self, site: AttentionSite) -> Form:
        raise NotImplementedError

    def form_multiplies(self, site: AttentionSite) -> int:
        """Multiply-adds of the bare form at one window."""
        raise NotImplementedError

    def value_mean(self, site: AttentionSite) -> tuple[float, float] | None:
        """The gain of the form and the shift of the values' mean beside it (ValueMean) that a conversion starts from;
        None where the form stands alone.
        """
        return None

    def refuse_form(self, site: AttentionSite) -> Refusal | None:
        """What the form itself refuses, where every linear form could stand."""
        return None

    def refuse(self, site: AttentionSite) -> Refusal | None:
        if reason := self._refuse_grid(site):
            return reason
        site = self._told(site)
        if reason := refuse_unless_plain(replace(site, bias="none")) or self._refuse_bias(site):
            return reason
        if self.local and image_grid(site) is None:
            return Refusal("local-without-grid", "local=true needs tokens that are known to be an image grid")
        if self.local and self._weighs_keys(site):
            return Refusal("local-with-key-mask", "masks keys, and local=true would read them all")
        return self.refuse_form(site)

    def _refuse_bias(self, site: AttentionSite) -> Refusal | None:
        """Where the scores carry what the form neither honours nor may leave out."""
        if site.bias == "none" or self._weighs_keys(site) or self._all_exact(site):
            return None
        if site.bias == "input":
            unweighed = as_refusal(self.no_key_bias)
            if unweighed and site.bias_of_keys:
                return Refusal(unweighed.code, f"masks keys, and the form {unweighed}")
            return Refusal("bias-is-input", "its scores carry a mask or bias that is an input of the model")
        if self.approximate:
            return None
        added = DROPPABLE[site.bias]
        return Refusal(added.code, f"{added}; approximate=true {self.approximation}")

    def note(self, site: AttentionSite) -> str | None:
        if self._all_exact(site):
            return "its only query keeps softmax, which costs no more"
        if site.bias == "none" or self._weighs_keys(site):
            return None
        rank, left = self.factors(site), self.left_out.format(bias=site.bias)
        return f"{left}, but for factors of rank {rank} that calibration gives" if rank else left

    def _weighs_keys(self, site: AttentionSite) -> bool:
        """Whether the bias is one that the form honours: of the keys alone."""
        return site.bias_of_keys and self.no_key_bias is None

    def uncalibrated(self) -> Variant:
        return replace(self, bias_rank=0)

    def build(self, site: AttentionSite) -> Form:
        site = self._told(site)
        if self._all_exact(site):
            return Softmax().build(site)
        form, start = self.form(site), self.value_mean(site)
        grid, prefix, scale = image_grid(site), self.exact_rows(site), score_scale(site)
        if self.local and grid:
            form = LocalBranch(form, grid, site.heads, site.value_dim, scale, *(start or ()))
        elif start is not None:
            form = ValueMean(form, site.heads, site.value_dim, scale, prefix, *start)
        if rank := self.factors(site):
            form = BiasFactors(form, site.heads, site.n_queries, site.n_keys, rank, scale, prefix)
        return ExactPrefix(form, prefix, scale) if prefix else form

    def multiplies(self, site: AttentionSite) -> int:
        site = self._told(site)
        if self._all_exact(site):
            return Softmax().multiplies(site)
        exact = self.exact_rows(site) * site.n_keys * (site.head_dim + site.value_dim)
        near = 9 * site.n_queries * site.value_dim if self.local else 0
        mixed = self.factors(site) * (site.n_queries + site.n_keys) * site.value_dim
        return site.windows * (self.form_multiplies(site) + site.heads * (exact + near + mixed))

    def _told(self, site: AttentionSite) -> AttentionSite:
        """The site, on the grid that was told where none is seen."""
        return site if self.grid is None or site.grid is not None else replace(site, grid=Grid.parse(self.grid))

    def _refuse_grid(self, site: AttentionSite) -> Refusal | None:
        """Where the grid that was told contradicts what is seen. A grid that is seen of other tokens is not meant."""
        told = None if self.grid is None else Grid.parse(self.grid)
        if told is None or site.axis != "token" or (site.grid is not None and site.n_queries != told.tokens):
            return None
        if site.n_queries != told.tokens or site.n_keys != told.tokens:
            counts = f"{site.n_queries} queries and {site.n_keys} keys"
            return Refusal("grid-of-other-tokens", f"has {counts}, and grid={told} is of {told.tokens} tokens")
        if site.grid is not None and site.grid != told:
            return Refusal("other-grid", f"has tokens that are seen to be a grid of {site.grid}, not {told}")
        return None

    def exact_rows(self, site: AttentionSite) -> int:
        """How many of the site's queries keep softmax."""
        if not self.exact_prefix:
            return 0
        return 1 if site.n_queries == 1 else prefix_queries(site)

    def factors(self, site: AttentionSite) -> int:
        """The rank of what stands for the site's bias (BiasFactors); 0 where nothing does."""
        queries, keys = site.n_queries, site.n_keys
        if site.bias == "none" or self._weighs_keys(site) or queries * keys > MOST_PAIRS:
            return 0
        return min(self.bias_rank, -(-min(queries, keys) // 4))

    def _all_exact(self, site: AttentionSite) -> bool:
        return self.exact_rows(site) == site.n_queries == 1
