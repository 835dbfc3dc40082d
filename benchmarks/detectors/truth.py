"""What attention a model really computes, recorded while it runs on two images.

Every torch function is intercepted; nothing here sees a graph, and nothing of attnrewrite is used. Tensors carry
*marks*: the products (matmul, bmm, einsum; not linear maps or convolutions) and the softmaxes that they came from
through elementwise arithmetic and data movement alone. Layers with weights and reductions end a mark, but for weights
that mix heads with heads and nothing else.

A softmax is a *site* if it reads the mark of such a product, and a later product that
sums as many elements as were normalised reads its own: softmax(q k^T) v.
It is over *channels* if in that first product the channel (detection_shadow.py) changes along the rows and not along
what is summed; else over *tokens*. It is no site if its keys belong to different images. `multi_head_attention_forward`
and `scaled_dot_product_attention` are attention by what they are, judged by the same rules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from detectors.shadow import (
    CONVOLUTIONS,
    Sum,
    carried,
    cast,
    cast_product,
    channel_changes,
    image_changes,
    mark_images,
    put,
    shadow,
)

Axis = Literal["token", "channel"]
Marks = frozenset["Product | Softmax"]

PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "baddbmm", "einsum"}
FUSED = {"scaled_dot_product_attention", "multi_head_attention_forward"}
WEIGHTED = {"linear", "layer_norm", "rms_norm", "batch_norm", "group_norm", "instance_norm", *CONVOLUTIONS}
POOLS = ("avg", "max", "adaptive_avg", "adaptive_max")
SHADOWED = {"linear", *CONVOLUTIONS}  # gives learnt queries channels, too
REDUCTIONS = {
    "sum", "mean", "amax", "amin", "max", "min", "topk", "argmax", "var", "std", "norm", "logsumexp", "log_softmax",
    "grid_sample", *(f"{kind}_pool{rank}d" for kind in POOLS for rank in (1, 2, 3)),
}  # fmt: skip
NO_PRODUCT = "its input is no product"
NO_VALUE = "no product sums values over its axis"
MIXES_IMAGES = "its keys belong to different images"


@dataclass(frozen=True)
class Event:
    """One softmax or fused attention call. `reason` says why it is no site; None for a site.

    `width` is the length of the first product's sum: channels of a head over tokens, tokens over channels.
    """

    call: str
    module: str
    reason: str | None
    axis: Axis = "token"
    n_queries: int = 0
    n_keys: int = 0
    width: int = 0

    @property
    def is_site(self) -> bool:
        return self.reason is None


@dataclass(eq=False)
class Product:
    """One product of tensors: what its sum runs over, and the sizes of its result."""

    axis: Axis
    mixes_columns: bool
    rows: int
    columns: int
    width: int
    elements: int
    heads: frozenset[int]

    @classmethod
    def of(cls, left: Tensor, right: Tensor, sums: Sum) -> "Product":
        across = channel_changes(left, sums.rows) or channel_changes(right, sums.columns)
        summed = channel_changes(left, sums.left) or channel_changes(right, sums.right)
        rows, columns = _size(left, sums.rows), _size(right, sums.columns)
        shared = frozenset(left.shape[axis] for axis in range(left.dim()) if axis not in sums.left + sums.rows)
        return cls(
            axis="channel" if across and not summed else "token",
            mixes_columns=image_changes(right, sums.columns),
            rows=rows, columns=columns, width=_size(left, sums.left),
            elements=left.numel() // _size(left, sums.left) * columns, heads=shared,
        )  # fmt: skip


@dataclass(eq=False)
class Softmax:
    """One call of softmax over `keys` numbers: the product that it reads, and whether a product has read it."""

    module: str
    product: Product | None
    keys: int
    mixes_rows: bool
    multiplies: bool = False

    @property
    def heads(self) -> frozenset[int]:
        return self.product.heads if self.product else frozenset()

    def event(self) -> Event:
        product = self.product
        if product is None:
            return Event("softmax", self.module, NO_PRODUCT)
        over_columns = self.keys == product.columns
        mixes = self.mixes_rows or (over_columns and product.mixes_columns)
        reason = NO_VALUE if not self.multiplies else MIXES_IMAGES if mixes else None
        queries = product.rows * product.columns // self.keys
        return Event("softmax", self.module, reason, product.axis, queries, self.keys, product.width)


class Recorder(TorchFunctionMode):
    """Records what runs inside `with`. `module` is the path of the module that is running."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Event | Softmax] = []
        self.module = ""

    def events(self) -> tuple[Event, ...]:
        return tuple(seen.event() if isinstance(seen, Softmax) else seen for seen in self.seen)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        name = name if name.startswith("__") else name.rstrip("_")
        given, made = _tensors((args, kwargs)), _tensors(result)
        if name == "__setitem__" and isinstance(args[2], Tensor):
            args[0]._marks = _marks(args[0]) | _marks(args[2])
        if not made or (name not in SHADOWED and all(shadow(tensor) is None for tensor in given)):
            return result
        if name in PRODUCTS and len(given) > 1:
            marks = self._product(name, args, given, made[0])
        elif name in FUSED:
            marks = self._fused(name, given, args, kwargs, made[0])
        else:
            marks = self._passed(name, given)
            if name == "softmax":
                marks = self._softmax(args, kwargs, marks)
            cast(name, func, args, kwargs, given, made)
        for tensor in made:
            tensor._marks = marks  # type: ignore[attr-defined]
        return result

    def _passed(self, name: str, given: list[Tensor]) -> Marks:
        """The marks that a call which is no product passes on."""
        marks = _marks(*given)
        if name in REDUCTIONS:
            return frozenset()
        if name not in WEIGHTED:
            return marks
        return frozenset(mark for mark in marks if _mixes_heads(given[1:], mark))

    def _product(self, name: str, args: Any, given: list[Tensor], made: Tensor) -> Marks:
        left, right = given[-2:][::-1] if name == "__rmatmul__" else given[-2:]
        equation = args[0] if name == "einsum" and isinstance(args[0], str) else None
        sums = Sum.of(left, right, equation)
        cast_product(lambda a, b: torch.einsum(equation, a, b) if equation else a @ b, left, right, sums, made)
        constants = [tensor for tensor in (left, right) if shadow(tensor) is None]
        mixed = frozenset(mark for mark in _marks(left, right) if _mixes_heads(constants, mark))
        if mixed:
            return mixed
        for mark in _marks(left, right):
            if isinstance(mark, Softmax) and mark.keys == _size(left, sums.left):
                mark.multiplies = True
        return frozenset({Product.of(left, right, sums)}) if sums.left else _marks(left, right)

    def _softmax(self, args: Any, kwargs: Any, marks: Marks) -> Marks:
        scores = args[0]
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        products = [mark for mark in marks if isinstance(mark, Product)]
        whole = [product for product in products if product.elements == scores.numel()]
        product = next(iter(whole + products), None)
        seen = Softmax(self.module, product, scores.shape[dim], image_changes(scores, (dim,)))
        self.seen.append(seen)
        return frozenset({seen})

    def _fused(self, name: str, given: list[Tensor], args: Any, kwargs: Any, made: Tensor) -> Marks:
        query, key, value = (args[place] if len(args) > place else kwargs[role] for place, role in enumerate(ROLES))
        if name == "multi_head_attention_forward":  # [tokens, images, channels]
            heads = args[4] if len(args) > 4 else kwargs["num_heads"]
            axis: Axis = "channel" if channel_changes(key, (0,)) and not channel_changes(key, (2,)) else "token"
            mixes, sizes = image_changes(key, (0,)), (query.shape[0], key.shape[0], query.shape[2] // heads)
        else:
            first, second = query.dim() - 1, key.dim() - 1
            product = Product.of(query, key, Sum((first,), (second,), (first - 1,), (second - 1,)))
            axis, mixes, sizes = product.axis, product.mixes_columns, (product.rows, product.columns, product.width)
        put(made, carried([value, query], made))
        self.seen.append(Event(name, self.module, MIXES_IMAGES if mixes else None, axis, *sizes))
        return frozenset()


ROLES = ("query", "key", "value")


def record(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Event, ...]:
    """Every softmax and fused attention that `model` computes on `inputs`, whose first axis is the image."""
    recorder = Recorder()
    for tensor in inputs:
        mark_images(tensor)
    with torch.no_grad(), _module_paths(model, recorder), recorder:
        model(*inputs)
    return recorder.events()


@contextmanager
def _module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    def enter(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            recorder.module = path

        return hook

    hooks = [module.register_forward_pre_hook(enter(path)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


def _marks(*tensors: Tensor) -> Marks:
    return frozenset().union(*(getattr(tensor, "_marks", frozenset()) for tensor in tensors))


def _mixes_heads(weights: list[Tensor], mark: "Product | Softmax") -> bool:
    """Whether every axis of every weight is as long as there are heads (or one)."""
    return bool(weights) and all(size == 1 or size in mark.heads for weight in weights for size in weight.shape)


def _size(tensor: Tensor, axes: tuple[int, ...]) -> int:
    size = 1
    for axis in axes:
        size *= tensor.shape[axis]
    return size
