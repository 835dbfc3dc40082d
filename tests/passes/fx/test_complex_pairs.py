"""Complex numbers as pairs of real ones, against torch's own."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from attnrewrite.passes.fx.complex_pairs import IN_PAIRS, ComplexAsPairs

aten = torch.ops.aten
# of z [batch, 3, 4] and w [3, 4], both complex, and r [3, 4], real
CASES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "z w": lambda z, w, r: z * w,
    "w z": lambda z, w, r: w * z,
    "z r": lambda z, w, r: z * r,
    "z 2": lambda z, w, r: 2 * z,
    "of parts": lambda z, w, r: z * torch.complex(r, r + 1),
    "of radius and angle": lambda z, w, r: z * torch.polar(r, r + 1),
    "conjugate": lambda z, w, r: z * w.conj(),
    "real": lambda z, w, r: z.real * w.imag,
    "view": lambda z, w, r: z.view(z.shape[0], -1) * w.view(1, 12),
    "reshape": lambda z, w, r: z.transpose(1, 2).reshape(-1, 12),
    "flatten": lambda z, w, r: z.flatten(1) * w.flatten(),
    "axes of one": lambda z, w, r: (z.unsqueeze(-1) * w.unsqueeze(1)[:, 0].unsqueeze(2)).squeeze(-1),
    "a part": lambda z, w, r: z[:, 1] * w[-1, :],
    "some": lambda z, w, r: z[:, 1:3, :2] * w[1:, 2:],
    "by places": lambda z, w, r: z * w[torch.tensor([2, 0, 2])],
    "turned": lambda z, w, r: z.mT.transpose(-1, -2) * w.permute(1, 0).transpose(0, -1),
    "spread": lambda z, w, r: z * w[None].expand(z.shape[0], -1, -1).contiguous(),
    "joined": lambda z, w, r: torch.cat([z, torch.stack([w, w], 1)[:1, 0] * z], -2),
}


class Complex(nn.Module):
    def __init__(self, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.compute = compute
        self.register_buffer("w", torch.view_as_complex(torch.randn(3, 4, 2, generator=generator)))
        self.r = nn.Parameter(torch.rand(3, 4, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        made = self.compute(torch.view_as_complex(x), self.w, self.r)
        return torch.view_as_real(made) if made.is_complex() else made


def exported(compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> ExportedProgram:
    return export(Complex(compute), (torch.randn(2, 3, 4, 2),), dynamic_shapes=({0: Dim.DYNAMIC},))


def complex_operations(program: ExportedProgram) -> list[str]:
    """What makes complex numbers, but for what is stored."""
    made = [node for node in program.graph.nodes if node.op == "call_function"]
    return [node.name for node in made if isinstance(node.meta["val"], Tensor) and node.meta["val"].is_complex()]


@pytest.mark.parametrize("name", CASES)
def test_pairs_compute_what_complex_numbers_do(name: str) -> None:
    program = exported(CASES[name])
    made = ComplexAsPairs().apply(program)
    assert made.modified
    assert complex_operations(program)
    assert not complex_operations(made.graph)
    x = torch.randn(5, 3, 4, 2, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(made.graph.module(check_guards=False)(x), Complex(CASES[name])(x))


def test_every_operation_is_among_the_cases() -> None:
    used = {node.target for case in CASES.values() for node in exported(case).graph.nodes}
    rare = {aten.alias.default, aten.detach.default, aten.clone.default, aten.sym_size.int, aten.squeeze.dim}
    assert set(IN_PAIRS) - used - rare == set()


@pytest.mark.parametrize(
    "compute",
    [
        lambda z, w, r: torch.fft.ifft(torch.fft.fft(z) * w),
        lambda z, w, r: z * w.exp(),
        lambda z, w, r: 1j * z * w,
        lambda z, w, r: z.abs() * r,
        lambda z, w, r: torch.cat([w, r]) * 2,
        lambda z, w, r: z * w[0, 0].flatten(),
    ],
)
def test_what_is_not_known_leaves_all_as_it_is(compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    program = exported(compute)
    made = ComplexAsPairs().apply(program)
    assert not made.modified
    assert made.graph is program
