"""What a worker's service generates with: a model, or a script in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifact_file import ArtifactFile
from greenroom.core.generation import Event, GenerationRequest
from greenroom.policies.base.events import Prediction

Events = list[tuple[int, Event]]
"""What a step gave: the number of what was begun, and its event; in order for each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What a scheduler is told. KV in tokens. ``expert_load_ms``: loading one expert from the tier below.
    ``token_ms``: a step, for one row of it. ``load_ms_by_task``: loading what one more request of the type would bring
    with it; a type that is not named: unknown."""

    kv_tokens: int = 0
    kv_tokens_free: int = 0
    running: int = 0
    waiting: int = 0
    resident_experts: int = 0
    experts: int = 0
    expert_load_ms: float = 0.0
    token_ms: float = 0.0
    load_ms_by_task: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """Where a sequence's first rows were routed: ``experts[rows, layers, k]``, indices within the layer, the largest
    value of the type where there was none. Its first ``prompt_rows`` rows are the prompt's. ``report``: what the expert
    policy says of the sequence; ``artifacts``: by kind, when that was made which it predicted by, Unix time in ms."""

    experts: NDArray[np.unsignedinteger]
    prompt_rows: int
    num_experts: int
    report: Mapping[str, float] = field(default_factory=dict)
    artifacts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Edition:
    """Which version of an artifact, and when it was made, Unix time."""

    version: int
    created_ms: int

    @classmethod
    def of(cls, file: ArtifactFile) -> Edition:
        return cls(file.version, file.created_ms)


class Engine(Protocol):
    """Used from one event loop, but for ``state``. ``begin`` and ``cancel`` do not wait; events come to what was given
    to ``listen``."""

    @property
    def alive(self) -> bool:
        """Whether it can generate. Once it can not, everything that was begun has had its end, or never will."""
        ...

    def listen(self, take: Callable[[Events], None]) -> None:
        """``take`` is called on the running event loop, once for all that a step gave."""
        ...

    def admit_check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for one that can never be served here."""
        ...

    def begin(self, number: int, request: GenerationRequest) -> None:
        """Generate behind ``request.prefix``. Whatever comes of it is an event, its failure to begin too.

        Where an earlier one of the same request is still ending it begins once that has ended.
        """
        ...

    def cancel(self, number: int) -> None:
        """Generate no more of it. It may still have events, or none."""
        ...

    def state(self) -> EngineState:
        """May take milliseconds; asked from any thread, by one at a time."""
        ...

    def take_routing(self, number: int) -> Routed | None:
        """The routing of one that has ended, where it was recorded; to be asked when its end is told, at most once."""
        ...

    def foresee(self, prediction: Prediction) -> None:
        """Hand a prediction to the expert policy, between steps."""
        ...

    @property
    def artifacts(self) -> Mapping[str, Edition | None]:
        """What the expert policy predicts by, of each kind that it takes; None: of that nothing yet."""
        ...

    def swap(self, file: ArtifactFile) -> None:
        """Have the expert policy predict by this from the next step on. May take a while; from any thread, one at a
        time. Raises InvalidConfig for one of another model."""
        ...
