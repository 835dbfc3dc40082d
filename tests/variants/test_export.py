"""Every form as a deployed thing: gradients, torch.export and ONNX."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from variant_sites import make_heads, make_site

from attnrewrite.site import AttentionSite, Grid
from attnrewrite.variants.registry import get_variant, variants

SITE = make_site(heads=2, head_dim=4, grid=Grid(3, 4, prefix=1))
CASES = [(name, {}) for name in sorted(variants())] + [
    ("l1", {"centred": False, "single_head": True}),
    ("mobile", {"reading": "code"}),
    ("mobile", {"reading": "paper"}),
    ("mobile", {"keep_heads": (0,)}),
    ("masked", {"size": 3, "heads": (1,)}),
    ("masked", {"soft": True}),
    ("separable", {"latents": 1}),
    ("additive", {"queries": 1}),
    ("polynomial", {"rank": 2}),
    ("relu-linear", {"local": True}),
]
LABELS = [" ".join([name, *(f"{key}={value}" for key, value in options.items())]) for name, options in CASES]
every_case = pytest.mark.parametrize(("name", "options"), CASES, ids=LABELS)


class Bare(nn.Module):
    """A form as it is deployed, a soft one as it is trained, without its bias argument, as export wants it."""

    def __init__(self, name: str, options: dict, site: AttentionSite = SITE) -> None:
        super().__init__()
        form = get_variant(name, options).build(site)
        self.form = form if options.get("soft") else form.deploy()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.form(query, key, value)


def inputs(batch: int, dtype: torch.dtype = torch.float32, site: AttentionSite = SITE) -> tuple[Tensor, ...]:
    return tuple(make_heads(site, batch=batch, dtype=dtype)[:3])


@every_case
def test_export_with_a_static_and_with_a_dynamic_batch(name: str, options: dict) -> None:
    module = Bare(name, options).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    static = torch.export.export(module, inputs(2))
    dynamic = torch.export.export(module, inputs(2), dynamic_shapes=({0: batch}, {0: batch}, {0: batch}))
    torch.testing.assert_close(static.module()(*inputs(2)), module(*inputs(2)))
    torch.testing.assert_close(dynamic.module()(*inputs(5)), module(*inputs(5)))
    ranks = [node.meta["val"].dim() for node in static.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert max(ranks) <= 5


@pytest.mark.parametrize("options", [{}, {"single_head": True}, {"centred": False}], ids=str)
def test_the_order_of_l1_follows_the_tokens_where_their_number_is_open(options: dict) -> None:
    """Under 8 tokens (query key^T) value is cheaper: `auto` takes it, and an export for any number gives the same."""
    module = Bare("l1", options, make_site(heads=2, head_dim=8, n_queries=-1))
    batch, tokens = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("tokens", min=2, max=4096)
    given = {count: inputs(3, site=make_site(heads=2, head_dim=8, n_queries=count)) for count in (3, 20, 300)}
    program = torch.export.export(module, given[20], dynamic_shapes=({0: batch, 2: tokens},) * 3)
    for parts in given.values():
        torch.testing.assert_close(program.module()(*parts), module(*parts), rtol=1e-4, atol=1e-5)


@every_case
def test_onnx_export_gives_the_same_numbers(name: str, options: dict) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    module = Bare(name, options).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module, inputs(2), dynamo=True, dynamic_shapes=({0: batch}, {0: batch}, {0: batch}), verbose=False
        )
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    fed = {name: tensor.numpy() for name, tensor in zip(names, inputs(5), strict=True)}
    (output,) = session.run(None, fed)
    torch.testing.assert_close(torch.from_numpy(output), module(*inputs(5)), rtol=1e-4, atol=1e-5)


GRADIENTS = CASES + [
    (name, option)
    for name in sorted(variants())
    if name != "softmax"
    for option in ({"local": True}, {"exact_prefix": False})
    if (name, option) not in CASES
]


@pytest.mark.parametrize(("name", "options"), GRADIENTS, ids=str)
def test_gradients(name: str, options: dict) -> None:
    site = make_site(heads=2, head_dim=4, grid=Grid(2, 3, prefix=1))
    module = Bare(name, options, site).double()
    tensors = [tensor.requires_grad_() for tensor in inputs(1, torch.float64, site)]
    parameters = list(module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def call(*arguments: Tensor) -> Tensor:
        return torch.func.functional_call(module, dict(zip(names, arguments[3:], strict=True)), arguments[:3])

    assert torch.autograd.gradcheck(call, (*tensors, *parameters), fast_mode=True)
