"""The plan: which variant stands at which site, with which weights. JSON and safetensors, applied by any pass."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attnrewrite.errors import InputError, Refusal
from attnrewrite.files import as_path
from attnrewrite.patterns.weights import FINGERPRINT, same_weights
from attnrewrite.site import AttentionSite, Scan
from attnrewrite.variants.base import Variant
from attnrewrite.variants.registry import get_variant, option_values

PLAN_FILE = "plan.json"
WEIGHTS_FILE = "weights.safetensors"


@dataclass(frozen=True)
class Placement:
    """A variant at a site: what the site was when the plan was made, and the rewritten module's tensors.

    `members` are the sites that it is made of, in a model that computes its heads apart: they are joined first.
    """

    site: str
    name: str
    variant: Variant
    heads: int
    head_dim: int
    n_queries: int
    n_keys: int
    fingerprint: str | None
    weights: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    members: tuple[str, ...] = ()

    @staticmethod
    def at(site: AttentionSite, variant: Variant, weights: Mapping[str, Tensor] | None = None) -> "Placement":
        shape = (site.heads, site.head_dim, site.n_queries, site.n_keys)
        return Placement(site.id, site.name, variant, *shape, site.fingerprint, weights or {}, site.members)


@dataclass(frozen=True)
class Plan:
    """Placements in graph order, and the parameters outside the sites that calibration refitted, by their names.

    `replaced` has a sketch of what each of those was: other files of the model store it under other names.
    """

    model: str
    placements: tuple[Placement, ...]
    parameters: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    replaced: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """The sites that are joined before the plan is carried out, by the id of what is made of them."""
        return {placement.site: placement.members for placement in self.placements if placement.members}

    def save(self, folder: Path) -> None:
        """Write plan.json and weights.safetensors into `folder`."""
        document = _Document(
            model=self.model,
            placements=[
                _Entry(
                    site=p.site, name=p.name, variant=p.variant.name, options=option_values(p.variant), heads=p.heads,
                    head_dim=p.head_dim, n_queries=p.n_queries, n_keys=p.n_keys, fingerprint=p.fingerprint,
                    members=list(p.members),
                )
                for p in self.placements
            ],
            replaced=dict(self.replaced),
        )  # fmt: skip
        tensors = {f"sites.{p.site}.{name}": tensor for p in self.placements for name, tensor in p.weights.items()}
        tensors |= {f"parameters.{name}": tensor for name, tensor in self.parameters.items()}
        tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / WEIGHTS_FILE)
        document.weights_sha256 = _sha256(folder / WEIGHTS_FILE)
        (folder / PLAN_FILE).write_text(json.dumps(document.model_dump(), indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> "Plan":
        """Read what `save` wrote. Raises InputError naming the file that is missing, damaged or of another version."""
        folder = as_path(folder)
        document = _read_document(folder / PLAN_FILE)
        try:
            tensors = load_file(folder / WEIGHTS_FILE)
            found = _sha256(folder / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{folder / WEIGHTS_FILE}: cannot be read as safetensors ({error}); convert again"
            ) from error
        if document.weights_sha256 not in (None, found):
            raise InputError(f"{folder / WEIGHTS_FILE}: not the weights that {PLAN_FILE} was saved with; convert again")
        tensors = {_of_today(name): tensor for name, tensor in tensors.items()}
        placements = tuple(
            Placement(
                entry.site, entry.name, get_variant(entry.variant, entry.options), entry.heads, entry.head_dim,
                entry.n_queries, entry.n_keys, entry.fingerprint, _under(tensors, f"sites.{entry.site}."),
                tuple(entry.members),
            )
            for entry in document.placements
        )  # fmt: skip
        return Plan(document.model, placements, _under(tensors, "parameters."), document.replaced)


def misfit(plan: Plan, scan: Scan) -> Refusal | None:
    """The first site of the plan that the scanned model does not have; None where the plan fits."""
    sites = {site.id: site for site in scan.sites}
    for placement in plan.placements:
        site = sites.get(placement.site)
        where = f"{placement.site} ({placement.name})"
        if site is None:
            return Refusal(
                "missing-site",
                f"is another model's: the plan does not fit {scan.model}: {where} is missing, "
                f"the model has {len(sites)} sites; apply the plan to the model that it was made from",
                site=placement.site,
            )
        for attribute in ("heads", "head_dim", "n_queries", "n_keys", "fingerprint"):
            mine, theirs = getattr(placement, attribute), getattr(site, attribute)
            if not (same_weights(mine, theirs) if attribute == "fingerprint" else mine == theirs):
                return Refusal(
                    "other-site",
                    f"is another model's: the plan does not fit {scan.model}: {where} has {attribute} "
                    f"{_short(theirs)}, the plan was made for {_short(mine)}; "
                    "apply the plan to the model that it was made from",
                    site=placement.site,
                )
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else f"{text[:24]}..."


def _of_today(name: str) -> str:
    """The name of a plan's tensor: version 0.1.0 wrote `.recut.` where a form's maps of query and key now stand."""
    return name.replace(".recut.", ".qk_maps.") if name.startswith("sites.") else name


_SiteId = Annotated[str, Field(pattern=r"^site\d{1,9}$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    site: _SiteId
    name: str
    variant: str
    options: dict[str, Any]
    heads: int
    head_dim: int
    n_queries: int
    n_keys: int
    fingerprint: Annotated[str, Field(pattern=FINGERPRINT)] | None
    members: list[_SiteId] = []  # version 0.1.0 wrote none


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    model: str
    placements: list[_Entry]
    weights_sha256: str | None = None  # version 0.1.0 wrote none
    replaced: dict[str, Annotated[str, Field(pattern=FINGERPRINT)]] = {}  # nor these


def _read_document(path: Path) -> _Document:
    try:
        return _Document.model_validate_json(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); give a folder that convert wrote") from error
    except (ValidationError, UnicodeDecodeError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise InputError(f"{path}: not a plan of this version ({what}); convert again") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
