"""What `explain` prints of heads that a loop computes apart."""

import io

import pytest
import torch
from head_loops import APART, HEADS, JOINED, TOKENS, WIDTH, Loop
from rich.console import Console

from attnrewrite.api import explain, supported
from attnrewrite.cli.explain import scan_data, scan_table

UNLIKE = "site0 and site1 differ in their scale"


@pytest.mark.parametrize(
    ("spelled", "groups", "said", "apart"),
    [
        (JOINED["slices, stacked"], ["site0"] * HEADS, "site0: site0, site1, site2 are heads of one attention", None),
        ((APART[0].heads, APART[0].join), [None] * HEADS, f"rewritten one by one: {UNLIKE}", UNLIKE),
    ],
    ids=["a group", "apart"],
)
def test_every_site_names_its_group(spelled: tuple, groups: list, said: str, apart: str | None) -> None:
    found = explain(Loop(*spelled).eval(), (torch.randn(2, TOKENS, WIDTH),))
    data = scan_data(found, supported(found))
    assert [site["group"] for site in data["sites"]] == groups
    assert data["groups"] == [{"id": "site0", "members": ["site0", "site1", "site2"], "apart": apart}]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(scan_table(found, supported(found)))
    text = console.export_text()
    assert said in text
    assert ("group" in text.splitlines()[2].split()) == (apart is None)
