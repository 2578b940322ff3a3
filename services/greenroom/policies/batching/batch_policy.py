"""BatchPolicy decides which rows form the next forward.

A pure function: the worker's loop describes what waits and what runs, gets a decision, carries it out. KV memory
is counted in one unit of the worker's choice (tokens, blocks); the policy only compares and adds.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Mask, Scores
from greenroom.policies.base.events import UNKNOWN_TASK, Phase


@dataclass(frozen=True, slots=True)
class WaitingSequence:
    """A request that has no KV memory yet.

    ``prefill_tokens``: prompt, and whatever prefix is forced behind it. ``kv_need``: what it is expected to hold at its
    end, or all that it may ever need where it must not be preempted again. ``waited_ms``: since it came; told to a
    policy that reads waits, of those for whom there is a place among the running. ``slo_ttft_ms``: within which time of
    its coming its client wants the first token; None: it has not said, or has that token.
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
    """A request that holds KV memory.

    ``prefill_left``: prompt tokens that no step has taken yet; 0 means that it decodes, one row a decision.
    ``kv_held``: what it holds. ``loss``: about how many of its rows would have to run again if it were preempted.
    ``preempted``: how often it was.
    """

    sequence: int
    prefill_left: int
    task: str = UNKNOWN_TASK
    kv_held: int = 0
    loss: int = 0
    preempted: int = 0

    @property
    def phase(self) -> Phase:
        return Phase.PREFILL if self.prefill_left > 0 else Phase.DECODE


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a step and the worker can hold.

    ``tokens_per_step``: rows in one forward. ``max_running``: sequences running at once; at most
    ``tokens_per_step``, so that every decoding sequence moves in every step, unless the policy ``plans_rounds``.
    ``kv_total``: the whole KV budget. ``prefill_chunk``: the most prompt tokens of one sequence in a step (None: what
    the step has room for). ``rows_per_forward``: the most decode rows in one forward, from 1 to ``tokens_per_step``
    (None: what it has room for).
    """

    tokens_per_step: int
    max_running: int
    kv_total: int
    prefill_chunk: int | None = None
    rows_per_forward: int | None = None
    plans_rounds: bool = False

    def __post_init__(self) -> None:
        if self.tokens_per_step < 1:
            raise InvalidConfig("tokens_per_step", self.tokens_per_step, "at least 1")
        if self.max_running < 1 and self.plans_rounds:
            raise InvalidConfig("max_running", self.max_running, "at least 1")
        if not 1 <= self.max_running <= self.tokens_per_step and not self.plans_rounds:
            raise InvalidConfig("max_running", self.max_running, f"from 1 to tokens_per_step ({self.tokens_per_step})")
        if self.kv_total < 0:
            raise InvalidConfig("kv_total", self.kv_total, "0 or more")
        if self.prefill_chunk is not None and self.prefill_chunk < 1:
            raise InvalidConfig("prefill_chunk", self.prefill_chunk, "at least 1, or None")
        if self.rows_per_forward is not None and not 1 <= self.rows_per_forward <= self.tokens_per_step:
            allowed = f"from 1 to tokens_per_step ({self.tokens_per_step}), or None"
            raise InvalidConfig("rows_per_forward", self.rows_per_forward, allowed)

    @property
    def decode_rows(self) -> int:
        """The most decode rows in one forward."""
        return self.rows_per_forward or self.tokens_per_step


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


@dataclass(frozen=True, slots=True, eq=False)
class SequencePaths:
    """Routing paths foretold of the next rows of ``sequences[S]``: ``chances[S, N]``, see ``TokenPaths``.

    Of a sequence that decodes it is the path of its one row, of another the union of its prompt's.
    """

    sequences: Ids
    chances: Scores


@dataclass(frozen=True, slots=True)
class BatchState:
    """What waits (in order of arrival) and what runs (in order of admission).

    ``kv_free``: what nobody holds. ``kv_expected``: what those that run are expected to take of it before they end, so
    what may be given to others is the difference. ``growing``: the running sequences that have no room for their next
    row, and what that takes.
    ``paths``: of all sequences that decode, and of others where they are known; told to a policy that reads paths.
    ``resident[N]``: the experts that are on the device. Both are the caller's, as in events. None: not known.
    """

    waiting: tuple[WaitingSequence, ...]
    running: tuple[RunningSequence, ...]
    kv_free: int
    limits: BatchLimits
    costs: StepCosts = UNKNOWN_COSTS
    paths: SequencePaths | None = field(default=None, compare=False)
    resident: Mask | None = field(default=None, compare=False)
    kv_expected: int = 0
    growing: Mapping[int, int] = field(default_factory=dict)


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
    """What to do now: refuse, preempt, admit (reserving KV), then run ``steps`` in order.

    ``refuse``: sequences that can never be served, with the reason. ``preempt``: running sequences that give up their
    KV and wait again; ``make_room`` says which. A sequence of ``growing`` gets what its next row takes where ``steps``
    have that row. ``admit``: waiting sequences that start; each has
    rows in ``steps``. ``steps`` is empty where nothing can move. It has several entries where the policy plans forwards
    together: a round, in which each decoding sequence has one row (ExpertFlow's token scheduler, §3.3).
    """

    steps: tuple[StepPlan, ...] = ()
    admit: tuple[int, ...] = ()
    refuse: tuple[tuple[int, str], ...] = ()
    preempt: tuple[int, ...] = ()


class BatchPolicy(ABC):
    """Invariants for every policy: the limits hold; chunks of one prompt keep their order; no running sequence
    waits forever; equal states give equal decisions. Where KV memory does not hold the next rows of all, it is
    ``make_room`` that says who gives up its own.

    ``applies_prefill_chunk``: whether it keeps to BatchLimits.prefill_chunk. ``plans_rounds``: whether more sequences
    may run than a forward has rows, since several forwards together move each of them. ``reads_waits``: whether it
    looks at WaitingSequence.waited_ms, ``reads_paths``: whether at BatchState.paths; only then they are told.
    ``without_paths``: what it does where nothing foretells paths, and who makes what does; for whoever makes it to say.
    """

    applies_prefill_chunk: ClassVar[bool] = True
    plans_rounds: ClassVar[bool] = False
    reads_waits: bool = False
    reads_paths: ClassVar[bool] = False
    without_paths: ClassVar[str] = ""

    @abstractmethod
    def decide(self, state: BatchState) -> BatchDecision:
        """The next forward, or forwards. Called between steps; changes nothing in ``state``."""
