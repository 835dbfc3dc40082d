"""One registry for what other packages may add to: built-in classes, and those of an entry-point group, by name.

What a package registers is foreign code. The first question that goes beyond the built-in names loads all of it and
vets each class: it can be used as the built-in ones are, or it is left out with the reason, and nothing else suffers.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from attnrewrite.errors import InputError, Refusal, required, unknown_name

OWN = "attnrewrite"
log = logging.getLogger(OWN)


class Named(Protocol):
    """What every registered class has."""

    name: ClassVar[str]


T = TypeVar("T", bound=Named)


@dataclass(frozen=True)
class Rules(Generic[T]):
    """What a foreign class must be: a subclass of `base` with a `name`, that is made without arguments.

    `texts` are class attributes that are strings. `methods` says what a subclass of each class there must define
    itself; the first one that is missing is reported, so the most special classes come first. `try_out` is given an
    instance and says what else keeps it from being used; whatever it raises counts as a fault of the class.
    """

    base: type[T]
    texts: tuple[str, ...]
    methods: Mapping[type, tuple[str, ...]]
    try_out: Callable[[T], Refusal | None]


class Registry(Generic[T]):
    """The classes of one kind by name. A name belongs to the built-in class that has it, else to the first package in
    alphabetical order that registers a usable one.

    `what` is the kind in messages ("variant"), `group` the entry-point group of other packages. `built_in` gives the
    built-in classes when they are first needed, as they may lie above the module that holds the registry.
    """

    def __init__(self, what: str, group: str, built_in: Callable[[], Mapping[str, type[T]]], rules: Rules[T]) -> None:
        self.what = what
        self.group = group
        self._make_built_in = built_in
        self._rules = rules

    @cached_property
    def built_in(self) -> Mapping[str, type[T]]:
        return self._make_built_in()

    def usable(self) -> dict[str, type[T]]:
        """Every class by name, the built-in ones first."""
        return {**self.built_in, **self._foreign[0]}

    def unusable(self) -> dict[str, str]:
        """What packages register and is left out, by name, and why: one sentence for each package that does so."""
        return {name: "; ".join(map(str, refusals)) for name, refusals in self._foreign[1].items()}

    def get(self, name: str) -> type[T]:
        """The class called `name`. A built-in one is found without loading foreign code.

        Raises:
            InputError: the name is unknown (with the nearest one that is known), or what bears it is left out (why).
        """
        required(f"the {self.what}", name, str)
        known = self.built_in if name in self.built_in else self.usable()
        if name not in known:
            unusable = self.unusable()
            raise InputError(unusable[name]) if name in unusable else unknown_name(self.what, name, known)
        return known[name]

    def forget(self) -> None:
        """Look again, at the next question, at what is installed."""
        self.__dict__.pop("_foreign", None)

    @cached_property
    def _foreign(self) -> tuple[dict[str, type[T]], dict[str, list[Refusal]]]:
        """The classes that packages register, and why others are left out, which is logged."""
        found: dict[str, type[T]] = {}
        left_out: dict[str, list[Refusal]] = {}
        owners = dict.fromkeys(self.built_in, OWN)
        for point in sorted(entry_points(group=self.group), key=lambda point: (point.name, _owner(point), point.value)):
            if point.name in owners:
                taken_by = owners[point.name]
                vetted: type[T] | Refusal = Refusal("name-taken", f"takes a name that is in use by {taken_by}")
            else:
                vetted = self._vet(point)
            if isinstance(vetted, Refusal):
                whose = f"{self.what} {point.name!r} of {_owner(point)} ({point.value})"
                said = Refusal(vetted.code, f"{whose} {vetted.sentence}: mend or uninstall the package")
                left_out.setdefault(point.name, []).append(said)
                log.warning("left out: %s", said)
            else:
                found[point.name], owners[point.name] = vetted, _owner(point)
        return found, left_out

    def _vet(self, point: EntryPoint) -> type[T] | Refusal:
        """The class that an entry point names, or what is wrong with it."""
        step, code = "does not load", "does-not-load"
        try:
            loaded = point.load()
            step, code = "cannot be looked at", "not-a-class"
            fault = next(self._faults(point.name, loaded), None)
            if fault is not None:
                return fault
            step, code = "cannot be made with its defaults", "not-made"
            fault = self._rules.try_out(loaded())
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign code raises what it likes: SystemExit, say
            return Refusal(code, f"{step}, {_said(error)}")
        return loaded if fault is None else fault

    def _faults(self, name: str, loaded: Any) -> Iterator[Refusal]:
        """What keeps `loaded`, registered as `name`, from being a class of this kind."""
        base = self._rules.base
        if not (isinstance(loaded, type) and issubclass(loaded, base)):
            yield Refusal("not-a-subclass", f"is not a subclass of {base.__module__}.{base.__qualname__}")
            return
        for text in ("name", *self._rules.texts):
            if not isinstance(getattr(loaded, text, None), str):
                yield Refusal("attribute-missing", f"has no {text}, which is to be a string")
        if loaded.name != name:
            yield Refusal("other-name", f"calls itself {loaded.name!r}, and is found by the name it is registered with")
        for parent, methods in self._rules.methods.items():
            for method in methods:
                if issubclass(loaded, parent) and getattr(loaded, method) is getattr(parent, method):
                    yield Refusal("method-missing", f"does not define {method}")


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else "an unnamed package"


def _said(error: BaseException) -> str:
    """An error's class and text in one line."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own __str__ may fail, too
        text = ""
    return f"{type(error).__name__}: {text or 'no message'}"
