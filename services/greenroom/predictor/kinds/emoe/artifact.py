"""A learned predictor as it is kept and handed out: a safetensors file, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.judging.gate import WITHHELD
from greenroom.predictor.kinds.config import BACKBONES
from greenroom.predictor.kinds.emoe.config import EMOE_KINDS
from greenroom.predictor.kinds.emoe.priors import ALL_TASKS, Priors
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.versions.artifact import Codec

FORMAT = "greenroom-learned-predictor"
FORMAT_VERSION = "1"
_PRIORS, _SLOTS, _WEIGHT = "priors", "slots", "weight."
_MOST = 1 << 20


@dataclass(frozen=True, slots=True)
class Architecture:
    """``tasks``: types with numbers of their own, all together included."""

    kind: str
    backbone: str
    layers: int
    slots: int
    experts: int
    tasks: int
    width: int
    depth: int

    def __post_init__(self) -> None:
        if self.kind not in EMOE_KINDS or self.backbone not in BACKBONES:
            raise ValueError(f"a predictor {self.kind!r:.50} of {self.backbone!r:.50}")
        for name in ("layers", "slots", "experts", "tasks", "width", "depth"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InvalidConfig(name, getattr(self, name), f"1 to {_MOST}")

    @property
    def heads(self) -> int:
        return 4 if self.width % 8 == 0 else 1


def width_for(experts: int) -> int:
    """The width for a model's layers: as many as they have experts, 32 to 128. The predictor then has a hundredth of
    the model's size or less."""
    return min(128, max(32, 8 * round(experts / 8)))


@dataclass(frozen=True, slots=True, eq=False)
class LearnedArtifact:
    """A predictor of ``model``'s experts. ``sequences``: how many it was trained on. ``weights``: by parameter.
    ``report``: how well it did on sequences that it had not seen, JSON."""

    model: str
    version: int
    created_ms: int
    architecture: Architecture
    priors: Priors
    weights: Mapping[str, npt.NDArray[np.float32]]
    sequences: int
    seed: int = 0
    report: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        return Shape(self.architecture.layers, self.architecture.experts)

    @property
    def withheld(self) -> str:
        """Why it is not served unless it is pinned; "": it may be served."""
        return str(self.report.get(WITHHELD, ""))

    @property
    def nbytes(self) -> int:
        """In memory."""
        return sum(one.nbytes for one in self.weights.values()) + self.priors.by_slot.nbytes

    def withheld_for(self, why: str) -> LearnedArtifact:
        return replace(self, report={**self.report, WITHHELD: why})

    def as_version(self, version: int, created_ms: int) -> LearnedArtifact:
        return replace(self, version=version, created_ms=created_ms)


def dump_learned(artifact: LearnedArtifact) -> bytes:
    """``priors`` [tasks, layers, k, experts], ``slots`` [layers, k] and ``weight.PARAMETER``, float32."""
    arrays: dict[str, npt.NDArray[Any]] = {_PRIORS: artifact.priors.by_slot, _SLOTS: artifact.priors.slots}
    arrays |= {f"{_WEIGHT}{name}": array for name, array in artifact.weights.items()}
    metadata = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kind": artifact.architecture.kind,
        "model": artifact.model,
        "version": str(artifact.version),
        "created_ms": str(artifact.created_ms),
        "architecture": json.dumps(asdict(artifact.architecture)),
        "tasks": json.dumps(artifact.priors.tasks),
        "sequences": str(artifact.sequences),
        "seed": str(artifact.seed),
        "report": json.dumps(artifact.report),
    }
    return dump_tensors(arrays, metadata)


def load_learned(data: bytes) -> LearnedArtifact:
    """Raises Damaged. The arrays are read-only views of ``data``. Whether the weights fit the architecture is checked
    when the network is built."""
    arrays, metadata = load_tensors(data)
    if (metadata.get("format"), metadata.get("format_version")) != (FORMAT, FORMAT_VERSION):
        raise Damaged(f"it is no {FORMAT} file of version {FORMAT_VERSION}")
    try:
        architecture = Architecture(**json.loads(metadata["architecture"]))
        tasks = tuple(json.loads(metadata["tasks"]))
        by_slot, slots = arrays.pop(_PRIORS), arrays.pop(_SLOTS)
        _check(architecture, tasks, by_slot, slots)
        if metadata["kind"] != architecture.kind or any(array.dtype != np.float32 for array in arrays.values()):
            raise ValueError("its parts contradict each other")
        return LearnedArtifact(
            model=metadata["model"],
            version=int(metadata["version"]),
            created_ms=int(metadata["created_ms"]),
            architecture=architecture,
            priors=Priors(tasks, by_slot, slots),
            weights={name.removeprefix(_WEIGHT): array for name, array in arrays.items()},
            sequences=int(metadata["sequences"]),
            seed=int(metadata["seed"]),
            report=json.loads(metadata["report"]),
        )
    except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError, InvalidConfig) as error:
        raise Damaged(f"something is missing or wrong in it: {error!r:.200}") from error


def codec_of(kind: str) -> Codec[LearnedArtifact]:
    """Its ``load`` raises Damaged for a file of another kind as well."""

    def load(data: bytes) -> LearnedArtifact:
        artifact = load_learned(data)
        if artifact.architecture.kind != kind:
            raise Damaged(f"it is of the kind {artifact.architecture.kind}, not {kind}")
        return artifact

    return Codec(kind, dump_learned, load, lambda artifact: artifact.withheld)


def _check(
    architecture: Architecture, tasks: tuple[Any, ...], by_slot: npt.NDArray[Any], slots: npt.NDArray[Any]
) -> None:
    expected = (architecture.tasks, architecture.layers, architecture.slots, architecture.experts)
    if by_slot.shape != expected or slots.shape != expected[1:3]:
        raise ValueError(f"priors of {by_slot.shape} and {slots.shape}, not {expected}")
    if len(tasks) != architecture.tasks or tasks[0] != ALL_TASKS or not all(isinstance(one, str) for one in tasks):
        raise ValueError("task types that do not fit its priors")
    if by_slot.dtype != np.float32 or not np.isfinite(by_slot).all() or not (by_slot > 0).all():
        raise ValueError("priors that are no shares")
    if slots.dtype != np.float32 or not np.isfinite(slots).all() or (slots < 0).any():
        raise ValueError("slots that are no shares")
