"""Class labels: what a package calls the classes of a classifier, and where it does."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from attnrewrite.errors import CheckFailedError, InputError
from attnrewrite.files import as_path
from attnrewrite.targets.record import Labels


def read_labels(given: str | Path | Sequence[str]) -> tuple[str, ...]:
    """Labels as they are given, or those of a text file, one a line; equal ones are told apart by their number.

    Raises:
        InputError: the file cannot be read, or a line of it is empty.
    """
    if isinstance(given, str | Path):
        path = as_path(given)
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise InputError(f"cannot read the labels {path}: {reason}") from error
        given = [line.strip() for line in text.rstrip().splitlines()]
        if given == []:
            raise InputError(f"{path} holds no labels: give one label a line, for each class of the model")
    if "" in given:
        raise InputError(f"label {given.index('') + 1} is empty: give one label a line, for each class of the model")
    times = Counter(given)
    return tuple(f"{label} ({number})" if times[label] > 1 else label for number, label in enumerate(given))


def named(name: str, labels: Sequence[str], outputs: Sequence[np.ndarray]) -> Labels:
    """The labels for a model that gives `outputs`, with a softmax where these are not probabilities themselves.

    Raises:
        InputError: they are not one number for each of the labels, of one image.
    """
    shapes = [array.shape for array in outputs]
    if len(shapes) != 1 or len(shapes[0]) != 2 or shapes[0][0] != 1:
        told = " and ".join(str(list(shape)) for shape in shapes)
        raise InputError(f"--labels: {name} is not a classifier of one image, its output is {told}: leave it out")
    if shapes[0][1] != len(labels):
        raise InputError(f"--labels: {name} has {shapes[0][1]} classes, and {len(labels)} labels are given")
    (values,) = outputs
    are_probabilities = (values >= 0).all() and np.allclose(values.sum(-1), 1, rtol=0, atol=1e-3)
    return Labels(tuple(labels), not are_probabilities)


class Probabilities(nn.Module):
    """Softmax of what `module` gives: Core ML's dictionary of labels holds probabilities."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.module(*inputs).softmax(-1)  # type: ignore[no-any-return]


def chosen_by(program: Any, labels: Labels) -> str:
    """The name of the value that a MIL program's labels are chosen by: what their softmax is of, where they have one.

    Raises:
        CheckFailedError: the program does not end in these labels, or lacks the softmax.
    """
    ending = next((each for each in program.functions["main"].operations if each.op_type == "classify"), None)
    if ending is None or tuple(map(str, ending.inputs["classes"].val)) != labels.names:
        raise CheckFailedError("the package does not answer with the labels that were given")
    value = ending.inputs["probabilities"]
    if value.op is not None and value.op.op_type == "cast":
        value = value.op.inputs["x"]
    if not labels.softmax:
        return str(value.name)
    if value.op is None or value.op.op_type != "softmax":
        raise CheckFailedError("the package gives no probabilities beside its labels")
    return str(value.op.inputs["x"].name)
