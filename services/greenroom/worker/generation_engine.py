"""What a worker's service generates with: a model, or a script in tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.generation import Event, GenerationRequest
from greenroom.policies.base.events import Prediction

Events = list[tuple[int, Event]]
"""What a step gave: numbers of generations, each with an event of it. In order for each number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """What a scheduler is told. KV in tokens that one sequence could have there. ``expert_load_ms``: the time to load
    one expert from the tier below. ``token_ms``: the time of a step for each of its rows. ``load_ms_by_task``: the time
    to load the experts that one more request of the type would need; unknown for a type that is not named."""

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
class RecordedRouting:
    """Where a sequence's first rows were routed: ``experts[rows, layers, k]``, indices within the layer. The largest
    value of the dtype stands for no pick. The first ``prompt_rows`` rows are the prompt's. ``report``: what the expert
    policy says of the sequence. ``artifacts``: by kind, when the artifact was made that the policy predicted by, Unix
    time in ms. ``tokens[rows]``: the id of each row's input; None where they are not to be told."""

    experts: NDArray[np.unsignedinteger]
    prompt_rows: int
    num_experts: int
    report: Mapping[str, float] = field(default_factory=dict)
    artifacts: Mapping[str, int] = field(default_factory=dict)
    tokens: NDArray[np.uint32] | None = None


@dataclass(frozen=True, slots=True)
class ArtifactVersion:
    """A version of an artifact, and when it was made, Unix time in ms."""

    version: int
    created_ms: int

    @classmethod
    def of(cls, file: ArtifactFile) -> ArtifactVersion:
        return cls(file.version, file.created_ms)


class GenerationEngine(Protocol):
    """Used from one event loop, except for ``state``. ``begin`` and ``cancel`` do not wait; events come to the function
    that ``listen`` was given."""

    @property
    def alive(self) -> bool:
        """Whether it can generate. Once it can not, a generation that has not ended yet never will."""
        ...

    def listen(self, take: Callable[[Events], None]) -> None:
        """``take`` is called on the running event loop, once for all that a step gave."""
        ...

    def admit_check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest for a request that can never be served here."""
        ...

    def begin(self, number: int, request: GenerationRequest) -> None:
        """Generate behind ``request.prefix``. Whatever comes of it is an event, a failure to begin too.

        While an earlier generation of the same request is still ending, the new one waits for that end.
        """
        ...

    def cancel(self, number: int) -> None:
        """Generate no more of it. Events of it may still come; its Finished does, if it has not come yet."""
        ...

    def state(self) -> EngineState:
        """May take milliseconds. Called from any thread, by one at a time."""
        ...

    def take_routing(self, number: int) -> RecordedRouting | None:
        """The recorded routing of a generation, if any. To be called at most once, when its end comes."""
        ...

    def foresee(self, prediction: Prediction) -> None:
        """Hand a prediction to the expert policy, between steps."""
        ...

    @property
    def artifacts(self) -> Mapping[str, ArtifactVersion | None]:
        """The artifacts that the expert policy predicts by, one for each kind that it takes; None: it has none yet."""
        ...

    def swap(self, file: ArtifactFile) -> None:
        """Have the expert policy predict by this file from the next step on. May take a while. Called from any thread,
        by one at a time. Raises InvalidConfig for a file of another model."""
        ...
