"""A model whose output is an embedding: no class to agree on, so that nothing says how often."""

import pytest
import torch
from fits import Model, pictures
from torch import nn

import attnrewrite
from attnrewrite.errors import InputError
from attnrewrite.images.dataset import Images

EXAMPLE = (torch.zeros(1, 3, 12, 12),)
LABELLED = Images(pictures(8).x, torch.arange(8).numpy() % 5)


def embedding() -> nn.Module:
    model = Model("pre-norm")
    model.head = nn.LayerNorm(8)  # type: ignore[assignment]
    return model


def test_an_embedding_is_brought_closer_by_its_values_and_no_agreement_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = attnrewrite.convert(embedding(), EXAMPLE, variant="l1", calibration=pictures(48), steps=2)
    copied, fitted, *_, distilled = made.report["calibration"]["stages"]
    assert "the output [images, 8] is taken for an embedding" in copied["notes"][0]
    assert fitted["error_after"] < copied["error_after"]
    assert distilled["error_after"] <= fitted["error_after"]
    figures = [each[name] for each in made.report["calibration"]["stages"] for name in ("kl_after", "agreement_after")]
    assert set(figures) == {None}
    found = attnrewrite.evaluate(made, pictures(8))
    assert [each.agreement for each in found.values()] == [None, None]
    assert list(found.values())[1].error is not None
    assert "no agreement: the output of" in caplog.text
    for data, classes in ((pictures(8), False), (LABELLED, True)):
        _, row = attnrewrite.compare(
            {"model": embedding(), "l1": made}, EXAMPLE, targets=["coreml-npu"], data=data
        ).rows
        assert [row.agreement is not None, row.output_error is None] == [classes, classes]


def test_labels_say_that_it_is_a_classifier_after_all() -> None:
    made = attnrewrite.convert(embedding(), EXAMPLE, variant="l1")
    *_, own = attnrewrite.evaluate(made, LABELLED).values()
    assert own.agreement is not None
    assert own.top1 is not None


@pytest.mark.parametrize(("classes", "told"), [(8, True), (7, False)])
def test_labels_of_as_many_classes_say_so_to_a_conversion(classes: int, told: bool) -> None:
    images = Images(pictures(48).x, torch.arange(48).numpy() % classes)
    made = attnrewrite.convert(embedding(), EXAMPLE, variant="l1", calibration=images)
    assert (made.report["calibration"]["stages"][-1]["agreement_after"] is not None) == told


def test_auto_refuses_an_embedding_unless_there_are_labels() -> None:
    with pytest.raises(InputError, match=r"the output of Model, \[48, 8\], is taken for an embedding"):
        attnrewrite.convert(embedding(), EXAMPLE, variant="auto", calibration=pictures(48), max_drop=1.0)
