"""The estimate of Core ML's latency: what is counted, what it sums to, and when its time is told."""

from typing import Any

import numpy as np
import pytest

from attnrewrite.errors import InputError
from attnrewrite.targets.coreml import latency
from attnrewrite.targets.coreml.latency import Fitted

ct = pytest.importorskip("coremltools", reason="coremltools is not installed")
from coremltools.converters.mil.mil import Builder as mb  # noqa: E402


def program() -> Any:
    """A convolution of [1, 4, 8, 8] to [1, 6, 8, 8], a softmax, a transpose, a product and a mean."""

    def build(x: Any) -> Any:
        made = mb.conv(x=x, weight=np.ones((6, 4, 1, 1), np.float32))
        made = mb.transpose(x=mb.softmax(x=mb.relu(x=made), axis=1), perm=[0, 1, 3, 2])
        seen = mb.matmul(x=mb.reshape(x=made, shape=[1, 48, 8]), y=np.ones((8, 2), np.float32))
        return mb.reduce_mean(x=seen, axes=[1])

    return mb.program(input_specs=[mb.TensorSpec(shape=(1, 4, 8, 8))], opset_version=ct.target.iOS17)(build)


def test_what_is_counted() -> None:
    image, made = 4 * 8 * 8, 6 * 8 * 8
    expected = {
        "multiply-adds of convolutions": made * 4,
        "multiply-adds of products": 48 * 2 * 8,
        "bytes of convolutions": 2 * (image + made),
        "bytes of movement": 2 * (made + made),
        "bytes of softmax": 2 * (made + made),
        "bytes of reductions": 2 * (48 * 2 + 2),
        "operators": 6,  # a reshape moves nothing
    }
    assert {term: 1e6 * found for term, found in latency.quantities(program()).items()} == pytest.approx(expected)


def fitted(**changes: Any) -> Fitted:
    values: dict[str, Any] = {
        "coefficients": {"operators": 1e6, "bytes of softmax": 1000.0}, "devices": {"old phone": 2.0, "phone": 1.0},
        "ranking": 0.96, "error": 0.1, "low": 0.8, "high": 1.3,
    }  # fmt: skip
    return Fitted(**(values | changes))


@pytest.mark.parametrize(("device", "scale"), [(None, 1.0), ("phone", 1.0), ("old phone", 2.0)])
def test_an_estimate_is_the_sum_times_the_devices_scale(
    device: str | None, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(latency, "fitted", fitted)
    found = latency.estimate(program(), device)
    assert found.ms == pytest.approx(scale * (6 + 1000 * 4 * 6 * 8 * 8 / 1e6))
    assert (found.low / found.ms, found.high / found.ms) == pytest.approx((0.8, 1.3))
    assert (found.device, found.trusted) == (device or "phone", True)


@pytest.mark.parametrize("changes", [{"ranking": 0.94}, {"error": 0.16}])
def test_an_estimate_that_is_too_far_off_is_not_trusted(changes: dict[str, float]) -> None:
    assert fitted().trusted
    assert not fitted(**changes).trusted


def test_a_device_that_nothing_is_known_of_names_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'phone'"):
        fitted().milliseconds({}, "phones")


def test_the_stored_coefficients_are_of_terms_that_are_counted() -> None:
    stored = latency.fitted()
    assert set(stored.coefficients) <= set(latency.TERMS)
    assert all(value > 0 for value in (*stored.coefficients.values(), *stored.devices.values()))
    assert 0 < stored.low < 1 < stored.high
