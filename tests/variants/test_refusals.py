"""Every reason that a form may give for not standing at a site: a table over all codes that the source holds."""

import re
from pathlib import Path

import pytest
from refusal_codes import codes_in
from variant_sites import make_site

from attnrewrite.errors import InputError, Refusal
from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.base import Variant, as_refusal, refusal_of
from attnrewrite.variants.linear import LinearVariant
from attnrewrite.variants.registry import get_variant

ROOT = Path(__file__).parents[2]
KEY_MASK = {"bias": "input", "bias_of_keys": True}
ON_GRID = {"grid": Grid(3, 4)}
# code: (variant, its options, what is unlike a plain self-attention at the site)
CASES: dict[str, tuple[str, dict, dict]] = {
    "over-channels": ("l1", {}, {"axis": "channel"}),
    "talking-heads": ("softmax", {}, {"talking_heads": True}),
    "probabilities-escape": ("softmax", {}, {"probs_escape": True}),
    "causal-mask": ("l1", {}, {"causal": True}),
    "bias-depends-on-query": ("l1", {}, {"bias": "depends-on-query"}),
    "no-core": ("softmax", {}, {"core": None}),
    "bias-is-input": ("l1", {}, {"bias": "input"}),
    "constant-bias": ("l1", {}, {"bias": "constant"}),
    "unpaired-counts": ("mobile", {}, {"n_keys": 5}),
    "unpaired-tokens": ("mobile", {}, {"kind": "cross"}),
    "unequal-channels": ("hydra", {}, {"value_dim": 16}),
    "queries-normed": ("xca", {}, KEY_MASK),
    "weights-normed": ("additive", {}, KEY_MASK),
    "far-keys-weighed": ("masked", {}, KEY_MASK | ON_GRID),
    "local-without-grid": ("relu-linear", {"local": True}, {}),
    "local-with-key-mask": ("relu-linear", {"local": True}, KEY_MASK | ON_GRID),
    "uneven-latents": ("separable", {"latents": 5}, {}),
    "uneven-queries": ("additive", {"queries": 5}, {}),
    "uneven-heads": ("mobile", {"head_dim": 5}, {}),
    "uneven-values": ("mobile", {"head_dim": 2}, {"value_dim": 6}),
    "unknown-heads": ("masked", {"heads": (0, 7)}, ON_GRID),
    "no-grid": ("masked", {}, {}),
    "beyond-grid": ("masked", {"size": 9}, ON_GRID),
    "too-many-heads": ("masked", {"heads": 3}, ON_GRID),
    "grid-of-other-tokens": ("masked", {"grid": "3x3"}, {}),
    "other-grid": ("l1", {"grid": "2x6"}, ON_GRID),
}
# given by variants of other packages alone
FOREIGN = {"refused", "keys-not-weighed", "options-not-kept", "variant-failed"}


@pytest.mark.parametrize("code", CASES)
def test_a_site_for_every_reason(code: str) -> None:
    name, options, change = CASES[code]
    found = refusal_of(get_variant(name, options), make_site(**change))
    assert found is not None
    assert found.code == code
    assert refusal_of(get_variant("softmax"), make_site()) is None


def test_every_reason_in_the_source_has_a_case() -> None:
    found = codes_in(ROOT / "attnrewrite" / "variants")
    assert found == {*CASES, *FOREIGN}
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", code) for code in found)


@pytest.mark.parametrize("text", ["3x3+1", " 3x3+1 ", "10x1", "1x8+2"])
def test_a_grid_that_cannot_be_seen_can_be_told(text: str) -> None:
    told, grid = get_variant("masked", {"grid": text}), Grid.parse(text)
    seen, unseen = make_site(grid=grid), make_site(n_queries=grid.tokens)
    assert refusal_of(told, unseen) is None
    assert told.multiplies(unseen) == get_variant("masked").multiplies(seen)
    local = get_variant("l1", {"local": True, "grid": text})
    assert str(local.build(unseen)) == str(get_variant("l1", {"local": True}).build(seen))
    assert refusal_of(told, make_site(grid=Grid(5, 5))) is None, "another stage, whose grid is seen"


@pytest.mark.parametrize("text", ["", "14", "0x3", "3x3+", "-1x4", "3x3x3", "14x14+1+1"])
def test_what_is_no_grid_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="is no grid: write rows x columns"):
        get_variant("l1", {"grid": text})


class Plain(LinearVariant):
    """A variant of another package: it answers with sentences, and says nothing of keys."""

    name, summary, source = "plain", "nothing", "nobody"

    def refuse_form(self, site: AttentionSite) -> str | None:  # type: ignore[override]
        return "has the wrong colour" if site.heads == 3 else None


class Undecided(Plain):
    no_key_bias = "looks at all keys"  # type: ignore[assignment]


class Failing(Plain):
    def refuse_form(self, site: AttentionSite) -> None:
        raise KeyError("no such thing\nanywhere")


FAILED = "its variant fails when it is asked (KeyError: 'no such thing\\nanywhere'): mend its package"


@pytest.mark.parametrize(
    ("variant", "change", "wanted"),
    [
        (Plain(), {}, None),
        (Plain(), {"heads": 3}, Refusal("refused", "has the wrong colour")),
        (Plain(), KEY_MASK, Refusal("keys-not-weighed", "masks keys, and the form has no weights for its keys")),
        (Failing(), {}, Refusal("variant-failed", FAILED)),
        (Undecided(), KEY_MASK, Refusal("refused", "masks keys, and the form looks at all keys")),
    ],
)
def test_a_sentence_alone_is_a_refusal_too(variant: Variant, change: dict, wanted: Refusal | None) -> None:
    assert refusal_of(variant, make_site(**change)) == wanted


def test_an_answer_with_a_code_stays_as_it_is() -> None:
    answer = Refusal("no-grid", "needs an image")
    assert as_refusal(answer) is answer
    assert as_refusal(None) is None
