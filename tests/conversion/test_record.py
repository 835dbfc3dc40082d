"""A converted folder read back: what stands at each site is what its plan says."""

import json
from pathlib import Path

import pytest
from tiny_vits import INPUTS, encoder

import attnrewrite as ar
from attnrewrite.api import sites_of
from attnrewrite.conversion.record import REPORT_FILE
from attnrewrite.frontends.sources import load_source
from attnrewrite.plan import Plan

FACTS = ("id", "name", "heads", "head_dim", "n_queries", "n_keys", "variant", "note")


@pytest.mark.parametrize(("variant", "options"), [("l1", {}), ("relu-linear", {"exact_prefix": False})])
@pytest.mark.parametrize("keep", [[], ["site0"], ["site1"]])
def test_the_sites_of_a_folder_are_those_of_the_conversion(
    variant: str, options: dict[str, object], keep: list[str], tmp_path: Path
) -> None:
    done = ar.convert(encoder(), INPUTS, variant=variant, options=options, keep=keep)
    folder = done.save(tmp_path / "out")
    wanted = tuple({key: site[key] for key in FACTS} for site in sites_of(done, load_source(folder)))
    found = sites_of(folder, load_source(folder))
    assert found == wanted
    replaced = [site["id"] for site in found if site["variant"] == variant]
    assert replaced == [placement.site for placement in Plan.load(folder).placements]
    assert [site["note"] for site in found if site["id"] in keep] == ["stays as it is: kept on request"] * len(keep)


def test_a_report_that_says_otherwise_changes_nothing(tmp_path: Path) -> None:
    folder = ar.convert(encoder(), INPUTS, variant="l1").save(tmp_path / "out")
    before = sites_of(folder, load_source(folder))
    report = json.loads((folder / REPORT_FILE).read_text())
    for site in report["sites"]:
        site |= {"variant": "mobile", "heads": 99, "name": "elsewhere"}
    (folder / REPORT_FILE).write_text(json.dumps(report))
    assert sites_of(folder, load_source(folder)) == before
