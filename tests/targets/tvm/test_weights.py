"""Weights in the pages of a library: taken out of the module once each, and the same numbers as the model runs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("tvm")

from attnrewrite.errors import InputError
from attnrewrite.targets import agreement as check
from attnrewrite.targets.prepare import reference, specialise
from attnrewrite.targets.tvm import compat as tvm_compat
from attnrewrite.targets.tvm.importer import import_program
from attnrewrite.targets.tvm.schedules import weights
from attnrewrite.targets.tvm.schedules.pipelines import cpu as pipeline
from attnrewrite.targets.tvm.schedules.profile import profile
from attnrewrite.targets.tvm.weights_object import compiled


class Shared(nn.Module):
    """One large weight read by two products, another, and small ones; integers that are looked up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.once = nn.Linear(160, 160), nn.Linear(160, 160)
        self.register_buffer("table", torch.randn(200, 160))
        self.register_buffer("places", torch.randint(200, (150,)))

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.twice(self.twice(x).relu()) + self.table[self.places])


INPUTS = (torch.randn(1, 150, 160, generator=torch.Generator().manual_seed(1)),)


def test_large_constants_are_taken_out_once_each() -> None:
    module = pipeline.schedule(import_program(specialise(Shared().eval(), INPUTS)), profile("host")).module
    found = weights.apart(module)
    assert len(found.weights) == 3
    assert all(array.nbytes >= weights.LARGE for array in found.weights)
    text = found.module["main"].script()
    assert [text.count(f'"{weights.FUNCTION}", {number}') for number in range(4)] == [1, 1, 1, 0]
    assert weights.FUNCTION not in module["main"].script()


def test_a_library_gives_the_modules_answers_with_its_weights_in_its_pages(tmp_path: Path) -> None:
    program = import_program(specialise(module := Shared().eval(), INPUTS))
    library = tmp_path / "model.so"
    tvm_compat.library_for_cpu(program, "host", library, tvm_compat.host_linker())
    for _ in range(2):
        check.agree("it", tvm_compat.bind(library, INPUTS, 2)(), reference(module, INPUTS), check.FLOAT32)
    # As they are, not as part of what the runtime reads into memory of its own.
    size = library.stat().st_size
    tvm_compat.export_library(tvm_compat.build_for_cpu(program, "host").executable, library, tvm_compat.host_linker())
    assert abs(library.stat().st_size - size) < 1 << 15


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "int32", "int64"])
@pytest.mark.parametrize("shape", [(3, 5, 7), (129,), ()])
def test_weights_of_every_type_come_back_as_they_were(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    import tvm

    random = np.random.default_rng(0)
    given = [random.integers(0, 100, shape).astype(dtype) for _ in range(3)]
    headers = tvm_compat.runtime_packages().headers
    held = compiled(given, tvm_compat.host_linker(), headers, tmp_path / "weights.o")
    program = import_program(specialise(nn.ReLU(), (torch.randn(2),)))
    built = tvm_compat.build_for_cpu(program, "host").executable
    library = tvm_compat.export_library(built, tmp_path / "model.so", tvm_compat.host_linker(), [held])
    give = tvm.runtime.load_module(str(library)).imports[0][weights.FUNCTION]
    for number, array in enumerate(given):
        found = give(number).numpy()
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert np.array_equal(found, array)


def test_a_compiler_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the weights cannot be made part of the library: no-such-compiler cannot be"):
        compiled([np.zeros(4)], "no-such-compiler", (), tmp_path / "weights.o")
    assert not list(tmp_path.iterdir())
