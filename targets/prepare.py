"""A module made ready for a compiler: exported for fixed shapes, its operators in spellings that compilers read."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from attnrewrite.errors import InputError, first_line
from attnrewrite.passes.base import Pipeline
from attnrewrite.passes.fx.decompositions import WRITTEN_OUT, Decompose
from attnrewrite.passes.fx.fold_constants import FoldConstants

CANONICAL: Pipeline[ExportedProgram] = Pipeline(
    (Decompose(WRITTEN_OUT), FoldConstants(), Decompose()), name="canonical"
)


def specialise(module: nn.Module, example_inputs: tuple[Tensor, ...]) -> ExportedProgram:
    """`module` exported for exactly the shapes of `example_inputs`, whatever dimensions it had been dynamic in.

    InputError where torch.export cannot capture it.
    """
    fast_path = torch.backends.mha.get_fastpath_enabled()
    # The fused encoder-layer operator of nn.TransformerEncoder is one that no importer knows.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return torch.export.export(module, example_inputs)
    except Exception as error:
        raise InputError(f"torch.export cannot capture the module for these inputs: {first_line(error)}") from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)


def canonical(program: ExportedProgram) -> ExportedProgram:
    """The program in operators that compilers read, none of them in place; what depends on no input is computed."""
    return CANONICAL(program)


def arrays(values: object) -> tuple[np.ndarray, ...]:
    """The tensors and arrays inside `values` (a tensor, a tuple, a dictionary, a model's output record), in order."""
    leaves = tree_leaves(values)
    tensors = (leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tuple(leaf for leaf in tensors if isinstance(leaf, np.ndarray))


def reference(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[np.ndarray, ...]:
    """What the module itself gives for `inputs`."""
    with torch.inference_mode():
        return arrays(module(*inputs))
