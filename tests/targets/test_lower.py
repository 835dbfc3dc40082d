"""Lowering small vision transformers for every target, and noticing when the result is not the model."""

import json
import platform
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vits import tiny_vit
from torch import nn

import attnrewrite as ar
from attnrewrite.conversion.record import deployed
from attnrewrite.errors import AttnRewriteError, CheckFailedError, InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.base import BUILT_IN, Artifact, get_target
from attnrewrite.targets.coreml import interpreter as mil_interpreter
from attnrewrite.targets.coreml import package
from attnrewrite.targets.tvm import compat as tvm_compat

FILES = {
    "host": {"model.so"},
    "arm-cpu": {"model.so", "model.tar"},
    "gpu": {"model.tar", "kernels.cl", "launches.json"},
    "coreml-npu": {"model.mlpackage"},
}
PRECISION = {"host": check.FLOAT32, "arm-cpu": check.FLOAT32, "gpu": check.FLOAT32, "coreml-npu": check.FLOAT16}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREWRITE_OFFLINE", "1")


def target_or_skip(name: str):
    target = get_target(name)
    reason = target.availability().build
    if reason is not None:
        pytest.skip(str(reason))
    return target


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Artifact]:
    """A tiny vision transformer of one block lowered for a target, once for the tests that read it."""

    @lru_cache
    def lower(name: str, attention: str) -> Artifact:
        model, inputs = tiny_vit(attention, depth=1)
        return target_or_skip(name).lower(attention, model, inputs, tmp_path_factory.mktemp("lowered"), threads=1)

    return lower


@pytest.mark.parametrize("attention", ["softmax", "l1", "relu-linear"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_target_lowers_every_form_and_says_how_it_was_checked(
    name: str, attention: str, lowered: Callable[[str, str], Artifact]
) -> None:
    model, inputs = tiny_vit(attention, depth=1)
    scale = float(model(*inputs).abs().max())
    made = lowered(name, attention)
    assert made.files
    assert set(made.files) <= {*FILES[name], "artifact.json"}
    assert made.size_bytes == sum(file.stat().st_size for file in made.path.rglob("*") if file.is_file())
    assert made.tolerance == pytest.approx(PRECISION[name] * scale)
    assert 0 < made.max_abs_error <= made.tolerance
    assert (made.model, made.target) == (attention, name)
    assert made.check
    assert made.schedule


def test_attention_matters_to_the_tiny_model() -> None:
    # Otherwise the cases above would not notice attention lost on the way.
    model, inputs = tiny_vit("softmax")
    expected = model(*inputs)
    for block in model.blocks:
        block.attend = lambda query, key, value: value.mean(-2, keepdim=True).expand_as(value)
    assert (model(*inputs) - expected).abs().max() > 10 * check.FLOAT16 * expected.abs().max()


def test_a_batch_is_lowered_as_one(tmp_path: Path) -> None:
    target = target_or_skip("host")
    model, _ = tiny_vit("l1", depth=1)
    made = target.lower("l1", model, (torch.randn(3, 3, 16, 16),), tmp_path, threads=1)
    assert made.check == "ran in TVM on this host"


def test_one_query_over_an_odd_number_of_tokens_is_lowered_where_tvms_own_rule_fails(tmp_path: Path) -> None:
    class Weigh(nn.Module):
        def forward(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return weights @ value

    inputs = (torch.randn(1, 4, 1, 257), torch.randn(1, 4, 257, 16))
    made = target_or_skip("gpu").lower("weigh", Weigh(), inputs, tmp_path, threads=1)
    assert set(made.files) <= {*FILES["gpu"], "artifact.json"}


@pytest.mark.parametrize("name", BUILT_IN)
def test_an_operator_that_a_compiler_lacks_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    class Bessel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x)

    with pytest.raises(AttnRewriteError, match="i0") as caught:
        target_or_skip(name).lower("bessel", Bessel(), (torch.randn(2, 3),), tmp_path, threads=1)
    assert "\n" not in str(caught.value)


def test_a_compiler_that_gets_it_wrong_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_or_skip("host")
    model, inputs = tiny_vit("softmax", depth=1)
    bind = tvm_compat.bind

    def wrong(*arguments):
        return lambda: tuple(array + np.float32(1e-3) for array in bind(*arguments)())

    monkeypatch.setattr(tvm_compat, "bind", wrong)
    with pytest.raises(CheckFailedError, match=r"vit for host: its output differs from the module's by 0\.001"):
        target.lower("vit", model, inputs, tmp_path, threads=1)


def test_the_host_runs_the_model_in_three_runtimes() -> None:
    target_or_skip("host")
    model, inputs = tiny_vit("l1", depth=1)
    runs = get_target("host").runs("l1", model, inputs, threads=1)
    assert [run.runtime for run in runs] == ["torch eager", "onnxruntime", "tvm"]
    assert runs[-1].note == "schedule: attnrewrite CPU schedules, products in fp32"
    expected = model(*inputs).numpy()
    for run in runs:
        assert run.call is not None, run.reason
        found = run.call()
        found = found if isinstance(found, torch.Tensor) else found[0]
        np.testing.assert_allclose(np.asarray(found), expected, rtol=0, atol=check.FLOAT32 * np.abs(expected).max())
        assert run.size_bytes > sum(weight.nbytes for weight in model.parameters()) * 0.9


def test_a_runtime_that_cannot_take_the_model_says_why_and_leaves_the_others() -> None:
    target_or_skip("host")

    class Bessel(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x)

    eager, _, tvm = get_target("host").runs("bessel", Bessel(), (torch.randn(2, 3),), threads=1)
    assert eager.call is not None
    assert tvm.call is None
    assert "i0" in str(tvm.reason)


@pytest.mark.parametrize("name", ["arm-cpu", "gpu", "coreml-npu"])
def test_targets_that_are_not_this_machine_are_not_measured_on_it(name: str) -> None:
    target = get_target(name)
    reason = target.availability().measure
    if reason is None:
        pytest.skip(f"this machine measures {name}")
    (run,) = target.runs("vit", nn.Identity(), (torch.randn(1),), threads=1)
    assert run.call is None
    assert run.reason == reason


def test_on_a_mac_core_ml_itself_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_or_skip("coreml-npu")
    import coremltools as ct

    class Interpreted:
        """A package with the predictions that a Mac would give, by name."""

        def __init__(self, path: Path) -> None:
            self.program = mil_interpreter.load(path)
            self.get_spec = ct.models.MLModel(str(path), skip_model_load=True).get_spec

        def predict(self, feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            given = {name: torch.from_numpy(values) for name, values in feed.items()}
            outputs = mil_interpreter.interpret(self.program, given).outputs
            return {name: values.numpy() for name, values in outputs.items()}

    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(package, "loaded", Interpreted)
    model, inputs = tiny_vit("l1", depth=1)
    assert target.availability().measure is None
    (run,) = target.runs("l1", model, inputs, threads=1)
    assert run.reason is None
    assert 0 < run.max_abs_error < check.FLOAT16 * float(model(*inputs).abs().max())
    assert re.match(r"loaded in \d+ ms, again in \d+ ms; no plan: ", run.note)
    assert next(iter(run.call().values())).shape == (1, 10)


def test_the_layout_for_the_engine_takes_away_transposes_and_the_exporters_is_to_be_had(
    lowered: Callable[[str, str], Artifact], tmp_path: Path
) -> None:
    target_or_skip("coreml-npu")
    model, inputs = tiny_vit("softmax", depth=1)
    as_is = ar.lower(model, "coreml-npu", tmp_path / "as-is", example_inputs=inputs, layout="as-is")
    transposes = {}
    for layout, made in (("engine", lowered("coreml-npu", "softmax")), ("as-is", as_is)):
        assert made.schedule.startswith(f"Core ML's own, layout {layout}: by known rules ")
        transposes[layout] = int(re.search(r"(\d+) transposes", made.schedule)[1])
    assert transposes["engine"] <= 1 < transposes["as-is"]


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("coreml-npu", {"layout": "asis"}, "unknown layout 'asis': did you mean 'as-is'"),
        ("host", {"layout": "engine"}, "target 'host' has no --layout: leave it out"),
        ("host", {"cpu": "cortex-a76"}, "target 'host' has no --cpu: leave it out"),
        ("arm-cpu", {"cpu": "cortex-a77"}, "unknown ARM processor 'cortex-a77': did you mean 'cortex-a7"),
        ("arm-cpu", {"cpu": "haswell"}, "unknown ARM processor 'haswell': known are apple-a14, "),
        ("arm-cpu", {"system": "androids"}, "unknown system 'androids': did you mean 'android'"),
        ("gpu", {"precision": "int8"}, "target 'gpu' has no --precision: leave it out, or lower for host or arm-cpu"),
        ("arm-cpu", {"precision": "int16"}, "unknown precision 'int16': did you mean 'int8'"),
    ],
)
def test_options_that_a_target_has_not(name: str, options: dict[str, str], why: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=why):
        ar.lower(nn.Identity(), name, tmp_path / "out", example_inputs=(torch.ones(1),), **options)
    assert not (tmp_path / "out").exists()


def test_the_gpus_launches_name_every_kernel_of_its_source(lowered: Callable[[str, str], Artifact]) -> None:
    made = lowered("gpu", "l1")
    record = json.loads((made.path / "launches.json").read_text())
    source = (made.path / "kernels.cl").read_text()
    launched = {launch["kernel"] for launch in record["launches"]}
    # TVM also leaves kernels in the source that it no longer launches: reshapes that became views.
    assert launched
    assert all(f"void {kernel}(" in source for kernel in launched)
    named = {name for launch in record["launches"] for name in launch["buffers"]}
    assert named <= set(record["buffers"])
    assert {*record["inputs"], *record["constants"], *(output["buffer"] for output in record["outputs"])} <= named


class Largest(nn.Module):
    """Values over their largest: along one axis, along two, and of all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + x.amax(3, keepdim=True) + x.amax((2, 3))[..., None, None] + x.abs().amax())


@pytest.mark.parametrize("name", ["host", "gpu"])
def test_the_largest_along_axes_is_known_to_tvm(name: str, tmp_path: Path) -> None:
    inputs = (torch.rand(1, 2, 5, 7, generator=torch.Generator().manual_seed(0)),)
    made = target_or_skip(name).lower("largest", Largest(), inputs, tmp_path, threads=1)
    assert made.max_abs_error <= made.tolerance


@pytest.mark.parametrize(("name", "variant"), [("host", "masked"), ("gpu", "mobile")])
def test_forms_that_tvms_own_rules_fail_on_are_lowered(name: str, variant: str, tmp_path: Path) -> None:
    target_or_skip(name)
    made = ar.lower(ar.convert(*tiny_vit("softmax", depth=1), variant=variant), name, tmp_path / "out")
    assert made.max_abs_error <= made.tolerance


class Tokens(nn.Module):
    """Every token of a vision transformer: the class token's row alone would hide the others' last attention."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.vit.tokens(images)


@pytest.mark.parametrize("size", [3, 5])
def test_masked_grid_tokens_reach_the_gpu_under_names_that_it_can_keep(size: int, tmp_path: Path) -> None:
    model, inputs = tiny_vit("softmax", depth=1)
    done = ar.convert(Tokens(model).eval(), inputs, variant="masked", options={"size": size})
    made = target_or_skip("gpu").lower("masked", deployed(done.module), inputs, tmp_path, threads=1)
    assert made.max_abs_error <= made.tolerance
    launches = json.loads((tmp_path / "launches.json").read_text())["launches"]
    assert max(len(launch["kernel"]) for launch in launches) < 120
