"""Our schedules as a Relax pipeline on modules that others made: TVM's own importers, and Relax written by hand."""

import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tiny_vits import Vit

from attnrewrite.errors import InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.tvm import relax_pipeline

tvm = pytest.importorskip("tvm")

from tvm import relax  # noqa: E402

from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline  # noqa: E402
from attnrewrite.targets.tvm.schedules.profile import profile  # noqa: E402
from attnrewrite.targets.tvm.schedules.rewrite import FALLBACK  # noqa: E402

torch.manual_seed(0)
MODEL, IMAGE = Vit(1).eval(), torch.randn(1, 3, 16, 16)


def by_torch(**how: bool) -> object:
    from tvm.relax.frontend.torch import from_exported_program

    return from_exported_program(torch.export.export(MODEL, (IMAGE,)), **how)


def by_onnx() -> object:
    onnx = pytest.importorskip("onnx")
    from tvm.relax.frontend.onnx import from_onnx

    file = io.BytesIO()
    torch.onnx.export(MODEL, (IMAGE,), file, dynamo=True, opset_version=18, verbose=False)
    return from_onnx(onnx.load_from_string(file.getvalue()), keep_params_in_input=False)


# The importer: (what it makes of the model, rules that take some of it, operators that are left).
IMPORTERS: dict[str, tuple[Callable[[], object], set[str], set[str]]] = {
    # torch's decomposition asks whether all scores of a row are -inf, and answers zeros there.
    "torch, decomposed": (
        by_torch,
        {"softmax", "matmul", "convolution", "normalise", "reduction"},
        {"equal", "logical_not", "astype", "max", "full_like", "where"},
    ),
    "torch": (
        lambda: by_torch(run_ep_decomposition=False),
        {"attention", "matmul", "convolution", "normalise", "reduction"},
        set(),
    ),
    "torch, weights as inputs": (
        lambda: by_torch(run_ep_decomposition=False, keep_params_as_input=True),
        {"attention", "matmul", "normalise", "elementwise", "reduction"},
        {"nn.conv2d"},
    ),
    "onnx": (by_onnx, {"attention", "matmul", "convolution", "normalise", "reduction"}, set()),
}


def compiled(module: object, *inputs: np.ndarray) -> np.ndarray:
    """The result of a module that our schedules went into."""
    target = tvm.target.Target(dict(profile("host").target))
    executable = tvm.compile(module, target, relax_pipeline=relax_pipeline("host"))
    found = relax.VirtualMachine(executable, tvm.cpu())["main"](*map(tvm.runtime.tensor, inputs))
    return (found if hasattr(found, "numpy") else found[0]).numpy()


def rules(module: object) -> tuple[set[str], set[str]]:
    """The rules that take values of a module, and the operators that none takes."""
    made = pipeline.schedule(module, profile("host")).decisions
    left = {each.operators[0] for each in made if each.rule == FALLBACK}
    return {each.rule for each in made} - {FALLBACK}, left


@pytest.mark.parametrize("importer", IMPORTERS)
def test_what_others_import_is_scheduled_and_right(importer: str) -> None:
    make, taken, left = IMPORTERS[importer]
    module = make()
    weights: list[np.ndarray] = []
    if "weights as inputs" in importer:
        module, held = relax.frontend.detach_params(module)
        weights = [each.numpy() for each in held["main"]]
    assert rules(module) == (taken, left)
    with torch.no_grad():
        check.agree(importer, [compiled(module, IMAGE.numpy(), *weights)], [MODEL(IMAGE).numpy()], check.FLOAT32)


@pytest.mark.parametrize(("precision", "halves"), [("fp32", False), ("fp16", True), ("int8", True)])
def test_a_pipeline_stores_what_a_precision_asks_for(precision: str, halves: bool) -> None:
    module = by_torch(run_ep_decomposition=False)
    with tvm.target.Target(dict(profile("cortex-a76").target)):
        made = relax_pipeline("cortex-a76", precision)(module)
    assert ("float16" in made.script()) is halves
    main = made["main"]
    assert [str(each.ty.dtype) for each in main.params] == ["float32"]


@pytest.mark.parametrize(
    ("core", "precision", "why"),
    [
        ("cortex-a72", "fp16", "cortex-a72 has no instructions for fp16"),
        ("cortex-a76", "fp64", "unknown precision 'fp64'"),
        ("cortex-a77", "fp32", "unknown processor 'cortex-a77': did you mean 'cortex-a7"),
    ],
)
def test_what_a_processor_cannot_do_is_refused_as_a_pipeline_is_made(core: str, precision: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        relax_pipeline(core, precision)


@pytest.mark.parametrize(
    ("bias", "scale", "causal"), [(False, None, None), (True, 0.7, None), (False, None, "TopLeft")]
)
def test_attention_of_relax_is_a_kernel_with_its_scale_and_bias(
    bias: bool, scale: float | None, causal: str | None
) -> None:
    draw = np.random.default_rng(0).normal
    shapes = [(2, 5, 3, 8), (2, 7, 3, 8), (2, 7, 3, 6), *([(2, 3, 5, 7)] if bias else [])]
    given = [draw(size=shape).astype(np.float32) for shape in shapes]
    builder = relax.BlockBuilder()
    inputs = [relax.Var(f"x{n}", relax.TensorType(shape, "float32")) for n, shape in enumerate(shapes)]
    with builder.function("main", inputs):
        with builder.dataflow():
            out = builder.emit_output(relax.op.nn.attention(*inputs, scale=scale, causal_mask=causal))
        builder.emit_func_output(out)
    module = builder.get()
    assert rules(module) == ((set(), {"nn.attention"}) if causal else ({"attention"}, set()))
    query, key, value = (torch.from_numpy(each).transpose(1, 2) for each in given[:3])
    mask = torch.from_numpy(given[3]) if bias else None
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, mask, is_causal=causal is not None, scale=scale
    )
    check.agree("attention", [compiled(module, *given)], [expected.transpose(1, 2).numpy()], check.FLOAT32)


def test_a_module_that_is_not_read_is_left_as_it_is() -> None:
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("other", [x]):
        builder.emit_func_output(builder.emit(relax.op.exp(x)))
    module = builder.get()
    made = pipeline.schedule(module, profile("host"))
    assert made.module is module
    assert [each.reason for each in made.decisions] == ["has no function of that name"]
