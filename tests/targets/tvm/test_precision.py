"""The precision of products as an option: which processors have instructions for it, and what is recorded of it."""

from dataclasses import replace

import pytest

from attnrewrite.targets.tvm.schedules.precision import refusal, stored
from attnrewrite.targets.tvm.schedules.profile import Profile, profile


def having(*features: str) -> Profile:
    core = profile("cortex-a76")
    return replace(core, target={**core.target, "mattr": [f"+{feature}" for feature in features]})


@pytest.mark.parametrize(
    ("precision", "able", "unable"),
    [
        ("fp32", having(), None),
        ("fp16", having("fullfp16"), having("neon", "dotprod")),
        ("fp16", having("avx512fp16"), having("avx512f", "f16c")),
        ("fp16", profile("cortex-a55"), profile("cortex-a72")),
        ("int8", having("dotprod"), having("neon", "fullfp16")),
        ("int8", having("avx512vnni"), having("avx512f")),
        ("int8", profile("cortex-a55"), profile("cortex-a72")),
    ],
)
def test_a_precision_takes_instructions(precision: str, able: Profile, unable: Profile | None) -> None:
    assert refusal(precision, able) is None
    if unable is not None:
        found = refusal(precision, unable)
        assert found is not None
        assert found.code == "instructions"
        assert found.sentence.startswith(f"has no instructions for {precision} (")


@pytest.mark.parametrize(
    ("precision", "processor", "dtype"),
    [
        ("fp32", having("fullfp16", "dotprod"), "float32"),
        ("fp16", having("fullfp16"), "float16"),
        ("int8", having("fullfp16", "dotprod"), "float16"),
        ("int8", having("dotprod"), "float32"),
        ("int8", having("avx512vnni"), "float32"),
        ("int8", having("avx512vnni", "avx512fp16"), "float16"),
    ],
)
def test_float16_is_stored_where_a_processor_computes_in_it(precision: str, processor: Profile, dtype: str) -> None:
    assert stored(precision, processor) == dtype
