"""BatchPolicy decides which rows form the next forward.

A pure function: the worker's loop describes what waits and what runs, gets a decision, carries it out. KV memory
is counted in one unit of the worker's choice (tokens, blocks); the policy only compares and adds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import UNKNOWN_TASK, Phase, Prediction


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """A request that has no KV memory yet.

    ``prefill_tokens``: prompt, and whatever prefix is forced behind it. ``kv_need``: what it must reserve to be
    sure to reach its end. ``waited_ms``: since it came; told to a policy that reads waits, of those for whom there
    is a place among the running. ``slo_ttft_ms``: within which time of its coming its client wants the first token;
    None: it has not said, or has that token.
    """

    sequence: int
    prefill_tokens: int
    kv_need: int
    task: str = UNKNOWN_TASK
    expected_tokens: int = 0
    waited_ms: float = 0.0
    slo_ttft_ms: float | None = None

    def __post_init__(self) -> None:
        if self.prefill_tokens < 1:
            raise ValueError(f"sequence {self.sequence} has no token to start from")


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A request that holds its KV reservation.

    ``prefill_left``: prompt tokens that no step has taken yet; 0 means that it decodes, one row a step.
    ``in_flight``: it has rows in a step that is not over. It may then give a further chunk of its prompt to the
    next step, but no decode row, whose token is not known yet.
    """

    sequence: int
    prefill_left: int
    in_flight: bool = False
    task: str = UNKNOWN_TASK

    @property
    def phase(self) -> Phase:
        return Phase.PREFILL if self.prefill_left > 0 else Phase.DECODE


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step and the worker can hold.

    ``tokens_per_step``: rows in one forward. ``max_running``: sequences running at once; at most
    ``tokens_per_step``, so that every decoding sequence moves in every step. ``kv_total``: the whole KV budget.
    ``prefill_chunk``: the most prompt tokens of one sequence in a step (None: what the step has room for).
    """

    tokens_per_step: int
    max_running: int
    kv_total: int
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        if self.tokens_per_step < 1:
            raise InvalidConfig("tokens_per_step", self.tokens_per_step, "at least 1")
        if not 1 <= self.max_running <= self.tokens_per_step:
            raise InvalidConfig("max_running", self.max_running, f"from 1 to tokens_per_step ({self.tokens_per_step})")
        if self.kv_total < 0:
            raise InvalidConfig("kv_total", self.kv_total, "0 or more")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise InvalidConfig("prefill_chunk", self.prefill_chunk, "at least 1, or None")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """What a step costs on this machine, in seconds, as far as it was measured. None: not known yet.

    ``row_seconds``: computing a row of a step that has prompts; ``fixed_seconds``: computing that such a step has
    whatever its rows. ``moving_seconds``: moving the experts that are missing, nearly all of which it needs.
    ``decode_seconds``: a step of decode rows alone, waits for experts included. Raises ValueError for what is no time.
    """

    row_seconds: float | None = None
    moving_seconds: float | None = None
    decode_seconds: float | None = None
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{entry.name} is {value}: no time in seconds")

    @property
    def balanced_rows(self) -> float | None:
        """R*: with so many rows computing them takes as long as what the step costs without them, which is moving
        experts, or what computing it has whatever its rows. Prompts in steps of their own would each pay that.

        None where a row's or moving's time is not known, and where nothing is missing.
        """
        if not self.row_seconds or not self.moving_seconds:
            return None
        return max(self.moving_seconds, self.fixed_seconds) / self.row_seconds

    def prompt_step_seconds(self, rows: int) -> float | None:
        """A step with prompts: computing and moving go on side by side. None: not known."""
        if self.row_seconds is None:
            return None
        return max(self.moving_seconds or 0.0, self.fixed_seconds + rows * self.row_seconds)


UNKNOWN_COSTS = StepCosts()


@dataclass(frozen=True, slots=True)
class BatchState:
    """What waits (in order of arrival) and what runs (in order of admission). ``kv_free`` is not reserved."""

    waiting: tuple[WaitingSequence, ...]
    running: tuple[RunningSequence, ...]
    kv_free: int
    limits: BatchLimits
    costs: StepCosts = UNKNOWN_COSTS


@dataclass(frozen=True, slots=True)
class Rows:
    """``tokens`` consecutive rows of one sequence: the next chunk of its prompt, or its one decode row."""

    sequence: int
    tokens: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The rows of one forward, in their order in it."""

    rows: tuple[Rows, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.rows)


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do now: refuse, admit (reserving KV), then run ``steps`` in order.

    ``refuse``: sequences that can never be served, with the reason. ``admit``: waiting sequences that start; each has
    rows in ``steps``. ``steps`` is empty where nothing can move. It has several entries where the policy plans batches
    together (ExpertFlow's token scheduler, §3.3); a sequence gives at most one decode row to all of them.
    """

    steps: tuple[StepPlan, ...] = ()
    admit: tuple[int, ...] = ()
    refuse: tuple[tuple[int, str], ...] = ()


class BatchPolicy(ABC):
    """Invariants for every policy: the limits hold; chunks of one prompt keep their order; no running sequence
    waits forever; equal states (and predictions) give equal decisions.

    ``applies_prefill_chunk``: whether it keeps to BatchLimits.prefill_chunk. ``reads_waits``: whether it looks at
    WaitingSequence.waited_ms, which only then is told.
    """

    applies_prefill_chunk: ClassVar[bool] = True
    reads_waits: bool = False

    @abstractmethod
    def decide(self, state: BatchState) -> BatchDecision:
        """The next forward, or forwards. Called between steps; changes nothing in ``state``."""

    def on_prediction(self, prediction: Prediction) -> None:  # noqa: B027 - most policies have no use for it
        """Predicted routing of running sequences, for policies that group rows by it (ExpertFlow §3.3.3)."""
