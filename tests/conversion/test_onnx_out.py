"""An ONNX file from explain to convert: what is saved computes what the torch module computes."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx_runs import exported_vit, run
from onnx_spellings import SPELLINGS as FILES
from onnx_spellings import proto
from spellings import SPELLINGS, build
from tiny_vits import IMAGE, Vit
from torch import nn

import attnrewrite as ar
from attnrewrite.conversion.onnx_out import write_file
from attnrewrite.conversion.record import deployed
from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.frontends.capture import capture
from attnrewrite.passes.fx.rewrite import FxRewrite
from attnrewrite.passes.onnx.diff import difference
from attnrewrite.passes.onnx.rewrite import OnnxRewrite
from attnrewrite.passes.verify import relative_error
from attnrewrite.plan import Plan

_ATTENDS = {
    "MatMul",
    "Gemm",
    "Add",
    "Mul",
    "Reshape",
    "Transpose",
    "Softmax",
    "Slice",
    "Split",
    "Squeeze",
    "Gather",
    "Concat",
    "Shape",
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small transformer as torch's exporter writes it, [B, 3, 16, 16] -> [B, 5], with two attentions."""
    path = tmp_path_factory.mktemp("files") / "vit.onnx"
    torch.manual_seed(0)
    ir.save(exported_vit(Vit().eval()), path)
    return path


def test_a_file_is_explained_without_torch(file: Path) -> None:
    found = ar.explain(file)
    assert (found.frontend, found.model, [site.id for site in found.sites]) == ("onnx", "vit", ["site0", "site1"])


def test_a_file_in_half_precision_is_converted(file: Path, tmp_path: Path) -> None:
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    onnx.save(float16.convert_float_to_float16(onnx.load(file), keep_io_types=True), tmp_path / "half.onnx")
    folder = ar.convert(tmp_path / "half.onnx", variant="l1").save(tmp_path / "out")
    wide = ar.convert(file, variant="l1").module
    images = torch.rand(2, *IMAGE[1:])
    (found,) = run(ir.load(folder / "model.onnx"), images.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(found, wide(images), rtol=0.02, atol=0.02)


def test_a_file_in_half_precision_that_leaves_its_range_is_not_written(file: Path, tmp_path: Path) -> None:
    """It is compared in float32, where weights of 30,000 do no harm."""
    float16 = pytest.importorskip("onnxruntime.transformers.float16")
    onnx.save(float16.convert_float_to_float16(onnx.load(file), keep_io_types=True), tmp_path / "half.onnx")
    converted = ar.convert(tmp_path / "half.onnx", variant="l1")
    (site,) = (part for part in converted.module.modules() if getattr(part, "site_id", "") == "site0")
    with torch.no_grad():
        site.value.weight.copy_(site.value.weight.sign() * 3e4)
        site.output.weight.mul_(1e-6)
    with pytest.raises(
        CheckFailedError, match="site0: the rewritten attention differs from its float64 reference by inf"
    ):
        converted.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    ready, inputs = deployed(converted.module), converted.example_inputs
    with pytest.raises(CheckFailedError, match="its answer has NaN or infinity in onnxruntime, which it did not"):
        write_file(tmp_path / "half.onnx", converted.plan, ready, inputs, None, tmp_path / "model.onnx")


def test_a_file_is_converted_and_calibrated(file: Path, tmp_path: Path) -> None:
    images = [torch.rand(4, *IMAGE[1:]) for _ in range(3)]
    done = ar.convert(file, variant="l1", calibration=images, keep=["site1"])
    folder = done.save(tmp_path / "out")
    report = json.loads((folder / "report.json").read_text())
    assert [site["variant"] for site in report["sites"]] == ["l1", "softmax"]
    onnx.checker.check_model(folder / "model.onnx", full_check=True)
    before, after = ir.load(file), ir.load(folder / "model.onnx")
    with torch.no_grad():
        wanted = done.module(images[0])
    np.testing.assert_allclose(run(after, images[0].numpy())[0], wanted, rtol=1e-4, atol=1e-5)
    found = difference(before, after)
    assert found.signature == ()
    assert {name.split("/")[0] for name in found.added} == {"attention_site0"}
    kept = {node.name for node in after.graph} & {node.name for node in before.graph}
    assert {node.op_type for node in before.graph if node.name not in kept} <= _ATTENDS
    assert sum(node.op_type == "Softmax" for node in after.graph) == 1
    again = ar.explain(folder / "model.onnx")
    assert [site.n_queries for site in again.sites] == [16]


class Block(nn.Module):
    """Attention with an MLP behind it, whose maps ONNX stores as [inputs, outputs]: [B, 3, 16, 16] -> [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.output = nn.Conv2d(3, 32, 4, 4), nn.Linear(32, 96), nn.Linear(32, 32)
        self.wide, self.narrow, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        query, key, value = self.heads(x)
        attended = (query @ key.transpose(2, 3) / 4).softmax(-1) @ value
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        x = x + self.narrow(torch.relu(self.wide(x)))
        return self.head(x.mean(1))

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.mix(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4).unbind(0)


def test_maps_of_a_file_are_fitted_and_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.rand(64, *IMAGE[1:])
    torch.onnx.export(Block().eval(), (images[:1],), tmp_path / "block.onnx", dynamo=False)
    done = ar.convert(tmp_path / "block.onnx", variant="l1", calibration=[images])
    assert len(done.plan.parameters) == 2  # the weight and bias of the MLP's last layer
    after = ir.load(done.save(tmp_path / "out") / "model.onnx")
    with torch.no_grad():
        np.testing.assert_allclose(run(after, images[:1].numpy())[0], done.module(images[:1]), rtol=1e-4, atol=1e-5)


class Normed(Block):
    """Queries and keys are normalised, so that their projection stays in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = super().heads(x)
        return self.norm(query), self.norm(key), value


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("made", [Block, Normed])
def test_what_was_fitted_in_torch_is_found_in_the_export_and_back(
    made: type[Block], dynamo: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    images, model = torch.rand(128, *IMAGE[1:]), made().eval()
    torch.onnx.export(model, (images[:1],), tmp_path / "block.onnx", dynamo=dynamo, external_data=False)
    file, graph = ir.load(tmp_path / "block.onnx"), capture("block", model, (images[:1],)).module
    in_torch, in_onnx = (
        ar.convert(*source, variant="l1", calibration=[images])
        for source in ((model, images[:1]), (tmp_path / "block.onnx",))
    )
    fitted = {"narrow.weight", "narrow.bias"} | ({"mix.weight"} if made is Normed else set())
    assert {*in_torch.plan.parameters} == fitted
    assert len(in_onnx.plan.parameters) == len(fitted)
    assert not fitted & {*file.graph.initializers} - {"narrow.bias"}, "weights have other names"
    in_torch.plan.save(tmp_path)
    written, _ = OnnxRewrite(Plan.load(tmp_path)).apply(file)
    with torch.no_grad():
        np.testing.assert_allclose(run(written, images[:1].numpy())[0], in_torch.module(images[:1]), rtol=0, atol=2e-6)
        torch.testing.assert_close(FxRewrite(in_onnx.plan)(graph)(images), in_onnx.module(images), rtol=0, atol=2e-6)
        assert float((in_onnx.module(images) - model(images)).abs().max()) > 1e-4


class Alike(Block):
    """A normalisation whose shift is the MLP's last bias, as far as its numbers go: exporters store both once."""

    def __init__(self) -> None:
        super().__init__()
        shifted = nn.LayerNorm(32)
        shifted.bias = nn.Parameter(self.narrow.bias.detach().clone())
        self.head = nn.Sequential(shifted, nn.Linear(32, 5))


def test_what_was_fitted_is_refused_where_a_file_does_not_tell_it_apart(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images, model = torch.rand(64, *IMAGE[1:]), Alike().eval()
    torch.onnx.export(model, (images[:1],), tmp_path / "alike.onnx", dynamo=False)
    plan, file = ar.convert(model, images[:1], variant="l1", calibration=[images]).plan, tmp_path / "alike.onnx"
    with pytest.raises(InputError, match=r"the file stores narrow.bias once for several readers; convert the file"):
        OnnxRewrite(plan).apply(ir.load(file))
    twice = ir.load(file)
    stored = next(value for value in twice.graph.initializers.values() if value.shape == (64, 32))
    twice.graph.register_initializer(ir.Value(name="again", const_value=stored.const_value))
    with pytest.raises(InputError, match=r"refits narrow.weight, and the model stores several tensors like it"):
        OnnxRewrite(plan).apply(twice)
    with torch.no_grad():
        model.narrow.weight.mul_(1.1)
    with pytest.raises(
        InputError, match=r"narrow.weight of shape \(32, 64\), the model has other numbers; apply it to"
    ):
        FxRewrite(plan).apply(capture("alike", model, (images[:1],)).module)


def test_what_a_file_stores_once_for_two_readers_is_not_fitted_for_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.rand(64, *IMAGE[1:])
    torch.onnx.export(Alike().eval(), (images[:1],), tmp_path / "alike.onnx", dynamo=False)
    stored = ir.load(tmp_path / "alike.onnx").graph
    assert [node.inputs[0].name for node in stored if node.op_type == "Identity"] == ["narrow.bias"]
    done = ar.convert(tmp_path / "alike.onnx", variant="l1", calibration=[images])
    assert [tensor.dim() for tensor in done.plan.parameters.values()] == [2]  # the weight, which is its own
    after = ir.load(done.save(tmp_path / "out") / "model.onnx")
    with torch.no_grad():
        np.testing.assert_allclose(run(after, images[:1].numpy())[0], done.module(images[:1]), rtol=1e-4, atol=1e-5)


class Pixels(nn.Module):
    """A transformer that takes bytes, channels last, and normalises them itself: [B, 16, 16, 3] -> [B, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = Vit()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.vit(x.permute(0, 3, 1, 2).float() / 255)


@pytest.fixture(scope="module")
def pixels_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("files") / "pixels.onnx"
    torch.manual_seed(0)
    example = torch.randint(0, 256, (2, 16, 16, 3), dtype=torch.uint8)
    program = torch.onnx.export(
        Pixels().eval(), (example,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("b")},), verbose=False
    )
    program.save(path)
    return path


def test_a_file_that_takes_bytes_is_calibrated_on_the_pixels_themselves(pixels_file: Path, tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (12, 16, 16, 3), np.uint8)
    np.savez(tmp_path / "d.npz", x=x)
    done = ar.convert(pixels_file, variant="l1", calibration=tmp_path / "d.npz")
    folder = done.save(tmp_path / "out")
    assert done.report["calibration"]["images"] == 12
    with torch.no_grad():
        wanted = done.module(torch.from_numpy(x))
    np.testing.assert_allclose(run(ir.load(folder / "model.onnx"), x)[0], wanted, rtol=1e-4, atol=1e-5)
    found = ar.evaluate(folder, tmp_path / "d.npz")["out"]
    assert found.n == 12
    assert found.agreement is not None


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("\n"), "RuntimeError"),
        (onnx.checker.ValidationError("\n no such operator\nat node 7"), "no such operator"),
    ],
)
def test_what_onnx_refuses_is_told_in_its_first_words(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, said: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise raised

    done = ar.convert(file, variant="l1")
    monkeypatch.setattr(onnx.checker, "check_model", refuse)
    with pytest.raises(CheckFailedError) as error:
        done.save(tmp_path / "out")
    assert str(error.value) == f"{file}: onnx refuses the rewritten model: {said}"
    assert not (tmp_path / "out").exists()


def test_the_mean_of_a_file_that_takes_bytes_is_its_own(pixels_file: Path) -> None:
    with pytest.raises(InputError, match=r"pixels takes the pixels themselves .* leave out --mean and --std"):
        ar.convert(pixels_file, variant="l1", mean=0.5, std=0.5)


@pytest.mark.skipif(find_spec("coremltools") is None, reason="coremltools is not installed")
def test_a_file_reaches_core_ml_which_takes_no_bytes(pixels_file: Path, tmp_path: Path) -> None:
    artifact = ar.lower(pixels_file, target="coreml-npu", out=tmp_path / "npu")
    assert artifact.notes == ("takes int32 for input 0 (uint8)",)
    assert artifact.max_abs_error < 0.05


def test_sites_are_called_what_explain_calls_them(file: Path) -> None:
    names = [site.name for site in ar.explain(file).sites]
    done = ar.convert(file, variant="l1", keep=names[:1])
    assert [site["name"] for site in done.report["sites"]] == names
    assert [site["variant"] for site in done.report["sites"]] == ["softmax", "l1"]


def test_a_checkpoint_is_no_use_to_a_file(file: Path) -> None:
    with pytest.raises(InputError, match=r"weights are inside: it takes no --checkpoint"):
        ar.explain(file, checkpoint="weights.pth")


class _Pooled(nn.Module):
    """Pooled by one learned query, as torch's own attention spells it: [B, 8, 16] -> [B, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 1, 16))
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.query(self.latent.expand(len(x), -1, -1))
        query, key, value = (
            each.unflatten(-1, (2, 8)).transpose(1, 2) for each in (queries, self.key(x), self.value(x))
        )
        pooled = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.out(pooled.transpose(1, 2).flatten(2))[:, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("images", [1, 2])  # of two, the file projects the query twice, and the module once
def test_a_learned_query_scaled_by_its_own_width_is_a_projection_of_its_own(images: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, tokens = _Pooled().eval(), torch.rand(images, 8, 16)
    torch.onnx.export(model, (tokens,), tmp_path / "pooled.onnx", dynamo=False, opset_version=17)
    done = ar.convert(tmp_path / "pooled.onnx", variant="softmax")
    folder = done.save(tmp_path / "out")
    (found,) = run(ir.load(folder / "model.onnx"), tokens.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(found, model(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["queries of every image", "queries of every head"])
def test_an_einsum_whose_keys_have_axes_of_their_own_is_many_attentions(name: str, tmp_path: Path) -> None:
    model, x = build(next(each for each in SPELLINGS if each.name == name))
    path, axes = tmp_path / "model.onnx", {"x": {0: "batch"}, "y": {0: "batch"}}
    torch.onnx.export(model, (x,), path, dynamo=False, input_names=["x"], output_names=["y"], dynamic_axes=axes)
    assert [site.name for site in ar.explain(path).sites] == [site.name for site in ar.convert(path).scan.sites]
    folder = ar.convert(path, variant="softmax").save(tmp_path / "out")
    written = ir.load(folder / "model.onnx")
    tokens = torch.randn(5, *x.shape[1:])
    with torch.no_grad():
        np.testing.assert_allclose(run(written, tokens.numpy())[0], model(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("variant", "depth"), [("l1", 1), ("softmax", 3)])
def test_a_file_that_onnxruntime_optimised_and_saved_can_be_optimised_again(
    variant: str, depth: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, images = Vit(depth).eval(), torch.rand(1, *IMAGE[1:])
    torch.onnx.export(model, (images,), tmp_path / "plain.onnx", dynamo=False, opset_version=17)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "plain.onnx", options, providers=["CPUExecutionProvider"])
    done = ar.convert(tmp_path / "optimised.onnx", variant=variant)
    folder = done.save(tmp_path / "out")
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, done.module(images), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ["result", "weight"])
def test_wrong_sizes_that_a_file_says_of_its_values_are_left_out(role: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    source, images = tmp_path / "model.onnx", torch.rand(1, *IMAGE[1:])
    torch.onnx.export(Vit(1).eval(), (images,), source, dynamo=False, opset_version=17)
    told = onnx.load(source)
    patches = next(node for node in told.graph.node if node.op_type == "Conv")
    value = patches.output[0] if role == "result" else patches.input[1]
    del told.graph.value_info[:]
    told.graph.value_info.append(onnx.helper.make_tensor_value_info(value, onnx.TensorProto.FLOAT, []))
    onnx.save(told, source)
    with pytest.raises(onnx.shape_inference.InferenceError, match="differ in rank"):
        onnx.checker.check_model(source, full_check=True)
    folder = ar.convert(source, variant="l1").save(tmp_path / "out")
    onnx.checker.check_model(folder / "model.onnx", full_check=True)


class _Best(nn.Module):
    """[B, 12, 16] -> the five tokens whose rounded mean is largest, after one attention; many means are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = self.proj(((q @ k.transpose(-2, -1)) * 8**-0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
        best = tokens.mean(-1).round().topk(5).indices
        return (tokens + attended).gather(1, best[..., None].expand(-1, -1, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_file_that_chooses_among_equal_numbers_is_written(dynamic: bool, tmp_path: Path) -> None:
    """Which of them torch chooses, onnxruntime does not."""
    torch.manual_seed(0)
    path, axes = tmp_path / "best.onnx", {"x": {0: "batch"}} if dynamic else None
    torch.onnx.export(
        _Best().eval(), (torch.randn(1, 12, 16),), path, dynamo=False, input_names=["x"], dynamic_axes=axes
    )
    done = ar.convert(path, variant="l1", calibration=[(torch.randn(24, 12, 16),)])
    folder = done.save(tmp_path / "out")
    (found,) = run(ir.load(folder / "model.onnx"), torch.randn(1, 12, 16).numpy())
    assert found.shape == (1, 5, 16)


def test_a_file_that_makes_much_of_rounding_is_written(tmp_path: Path) -> None:
    """What onnxruntime and torch round otherwise is as large as what float32 loses of float64 in torch alone."""
    opset, body = FILES["plain"]
    body = body.replace("y = Add(o3, bo)", "o4 = Add(o3, bo) o5 = Mul(o4, thousands) y = Sin(o5)")
    body = f"thousands = Constant<value_float=3e3>() {body}"
    (tmp_path / "model.onnx").write_bytes(proto(body, opset).SerializeToString())
    ar.convert(tmp_path / "model.onnx", variant="l1").save(tmp_path / "out")
    x = torch.randn(4, 10, 16, generator=torch.Generator().manual_seed(0))
    (found,) = run(ir.load(tmp_path / "out" / "model.onnx"), x.numpy())
    with torch.no_grad():
        own = torch.export.load(tmp_path / "out" / "model.pt2").module()(x)
    assert 1e-4 < relative_error(torch.from_numpy(found), own) < 1e-2
