"""What is taken from a file's own graph, for the sites of the graph that it was imported as."""

from dataclasses import replace

from onnx_spellings import spelled

from attnrewrite.conversion.sites import as_in_file
from attnrewrite.errors import Refusal
from attnrewrite.patterns.onnx.graph import OnnxGraph, scan_onnx
from attnrewrite.site import Grid


def test_what_the_file_does_not_show_no_form_is_given() -> None:
    found = scan_onnx(OnnxGraph(spelled("plain")), "model")
    (site,) = found.sites
    imported = replace(found, sites=(replace(site, name="softmax", grid=Grid(2, 5, 0)),))
    assert as_in_file(imported, None).sites == imported.sites
    assert as_in_file(imported, found).sites == found.sites
    hidden = replace(site, core=None, core_reason=Refusal("joined-scores", "scores are joined with others"))
    assert as_in_file(imported, replace(found, sites=(hidden,))).sites == (hidden,)
    others = replace(found, sites=(replace(site, fingerprint=None),))
    (other,) = as_in_file(imported, others).sites
    assert other.core_reason is not None
    assert (other.core, other.core_reason.code) == (None, "other-in-file")
