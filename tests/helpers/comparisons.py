"""A comparison such as `compare` finds, for the tests of what is made of it."""

from attnrewrite.api import Comparison
from attnrewrite.evaluation.records import Quantiles, Row

SCHEDULE = "attnrewrite CPU schedules"
LONG = "a_model_with_a_name_that_is_long_enough_to_trouble_a_phone <script>alert(1)</script>"
QUALITY = {"original": (94.8, None), "l1": (86.1, 88.0), LONG: (91.0, 93.0)}
FACTORS = {"torch": 1.0, "onnxruntime": 0.75, "tvm": 5.0}
BASE = {"original": 12.0, "l1": 9.0, LONG: 24.0}


def site(index: int, variant: str) -> dict[str, object]:
    sizes = {"heads": 4, "head_dim": 16, "n_queries": 257, "n_keys": 257}
    return {"id": f"site{index}", "name": f"blocks.{index}.attn", "variant": variant, "note": None, **sizes}


def rows(model: str) -> list[Row]:
    top1, agreement = QUALITY[model]
    sites = tuple(site(index, "softmax" if model == "original" else "l1") for index in range(4))
    milliseconds = BASE[model]

    def row(target: str, runtime: str, latency: Quantiles | None, note: str) -> Row:
        status = "measured" if latency else "unavailable"
        return Row(
            model,
            target,
            runtime,
            status,
            latency,
            None,
            None,
            top1,
            agreement,
            873_256,
            218_314,
            84_321_000,
            3.4e-7,
            sites,
            note,
        )

    timed = [
        row(
            "host",
            runtime,
            Quantiles(milliseconds * factor, milliseconds * factor * 1.1),
            SCHEDULE if runtime == "tvm" else "",
        )
        for runtime, factor in FACTORS.items()
    ]
    return [*timed, row("coreml-npu", "coreml", None, "needs a Mac or an iPhone: there is none here")]


COMPARISON = Comparison(
    {"processor": "a processor", "threads": 1}, tuple(row for model in QUALITY for row in rows(model))
)
