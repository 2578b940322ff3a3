"""What all artifacts have in common, whatever their kind: model, version, file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar


@dataclass(frozen=True, slots=True)
class ArtifactInfo:
    """What a list of artifacts says of each. ``created_ms``: Unix time. ``bytes``: of the file. ``withheld``: why it is
    not served unless it is pinned; "": it may be served."""

    version: int
    model: str
    created_ms: int
    sequences: int
    kind: str
    bytes: int = 0
    withheld: str = ""


class Artifact(Protocol):
    """A dataclass. ``sequences``: how many it was made of."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def model(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def created_ms(self) -> int: ...

    @property
    def sequences(self) -> int: ...


A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True, slots=True)
class Codec(Generic[A]):
    """How artifacts of the kind ``kind`` are written. ``load`` raises Damaged. ``withheld``: see ArtifactInfo."""

    kind: str
    dump: Callable[[A], bytes]
    load: Callable[[bytes], A]
    withheld: Callable[[A], str] = lambda artifact: ""

    def info(self, artifact: A, nbytes: int = 0) -> ArtifactInfo:
        return ArtifactInfo(
            artifact.version,
            artifact.model,
            artifact.created_ms,
            artifact.sequences,
            self.kind,
            nbytes,
            self.withheld(artifact),
        )
