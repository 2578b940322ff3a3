"""The base of artifact files, which policies predict by: safetensors, read without torch."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy.typing as npt

from greenroom.core.errors import InvalidConfig
from greenroom.core.files import write_whole
from greenroom.core.tensors import Damaged, dump_tensors, load_tensors

FORMAT_VERSION = "1"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ArtifactFile(ABC):
    """Arrays about one model's experts, and what they were made from.

    ``model``: its name in the services, or "". ``experts_per_layer``: of every MoE layer. ``sequences``: how many
    sequences' routing it was made from. ``report``: how it was made, JSON. ``created_ms``: Unix time.
    """

    KIND: ClassVar[str]
    MADE_BY: ClassVar[str]
    """The command that makes such a file, for error messages."""

    model: str
    experts_per_layer: tuple[int, ...]
    sequences: int
    version: int = 1
    created_ms: int = field(default_factory=lambda: round(time.time() * 1000))
    report: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidConfig where the arrays do not fit such a model."""
        if not self.experts_per_layer or min(self.experts_per_layer) < 1:
            raise InvalidConfig("experts_per_layer", self.experts_per_layer, "at least one layer, each with an expert")
        if not isinstance(self.report, Mapping):
            raise InvalidConfig("report", type(self.report).__name__, "names and what is told of each")
        self._check()

    @property
    @abstractmethod
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        """By the names that policies know."""

    @classmethod
    def _fields_of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Any]:
        """The fields that ``arrays`` came from: each array is one, if not said otherwise."""
        return arrays

    @abstractmethod
    def _check(self) -> None:
        """Raises InvalidConfig where an array has a wrong shape, type or value."""

    @property
    def size(self) -> int:
        """Experts of all layers."""
        return sum(self.experts_per_layer)

    @property
    def shape(self) -> str:
        """Layers and experts, for people."""
        layers, widths = len(self.experts_per_layer), sorted(set(self.experts_per_layer))
        return f"{layers} layers × {' or '.join(map(str, widths))} experts"

    # -- bytes and files -------------------------------------------------------------------------------------------

    def dump(self) -> bytes:
        metadata = {
            "format": f"greenroom-{self.KIND}",
            "format_version": FORMAT_VERSION,
            "model": self.model,
            "version": str(self.version),
            "created_ms": str(self.created_ms),
            "experts_per_layer": json.dumps(self.experts_per_layer),
            "sequences": str(self.sequences),
            "report": json.dumps(self.report),
        }
        return dump_tensors(self.arrays, metadata)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Raises Damaged. The arrays are read-only views of ``data``."""
        arrays, metadata = load_tensors(data)
        if (metadata.get("format"), metadata.get("format_version")) != (f"greenroom-{cls.KIND}", FORMAT_VERSION):
            raise Damaged(f"it is no greenroom-{cls.KIND} file of version {FORMAT_VERSION}")
        try:
            report = json.loads(metadata["report"])
            if not isinstance(report, dict):
                raise TypeError("its report is no JSON object")
            return cls(
                model=metadata["model"],
                experts_per_layer=tuple(int(count) for count in json.loads(metadata["experts_per_layer"])),
                sequences=int(metadata["sequences"]),
                version=int(metadata["version"]),
                created_ms=int(metadata["created_ms"]),
                report=report,
                **cls._fields_of(arrays),
            )
        except (LookupError, ValueError, TypeError, OverflowError, RecursionError, InvalidConfig) as error:
            raise Damaged(f"something is missing or wrong in it: {error!r:.200}") from error

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises InvalidConfig, naming the file, where it can not be read or is of another kind."""
        try:
            return cls.parse(path.read_bytes())
        except OSError as error:
            raise InvalidConfig(cls.KIND, str(path), f"a file that can be read: {error.strerror}") from error
        except Damaged as error:
            raise InvalidConfig(cls.KIND, str(path), f"a file that `{cls.MADE_BY}` made: {error}") from error

    def write(self, path: Path) -> None:
        """Written whole or not at all. Raises OSError."""
        write_whole(path, self.dump())
