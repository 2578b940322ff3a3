"""The steps of a trace as a batch policy forms them: its decisions, with the state that a batch loop would have."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Mask, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import (
    UNKNOWN_COSTS,
    BatchLimits,
    BatchPolicy,
    BatchState,
    Rows,
    RunningSequence,
    SequencePaths,
    StepCosts,
    WaitingSequence,
)
from greenroom.replay.traces.routing_trace import PREFILL_CHUNK, RoutingTrace
from greenroom.replay.traces.steps import TraceStep
from greenroom.replay.traces.trace_file import TraceError

_TOKENS_PER_STEP = 512


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledStep:
    """``step``, with the paths ``[T, N]`` that were foretold of its rows. ``following``: the one that was planned
    together with it and comes next, as far as it can be known before this one has run.
    """

    step: TraceStep
    paths: Scores | None = None
    following: ScheduledStep | None = None


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How steps are formed: see ``BatchLimits``. ``concurrent``: sequences running at once, taken in file order.

    ``paths``: foretells paths by each row's tokens, which then must be recorded. ``known``: paths are those that the
    trace has, in place of foretold ones. ``resident`` and ``costs``: asked before each decision. Raises InvalidConfig.
    """

    concurrent: int
    rows_per_forward: int | None = None
    tokens_per_step: int = _TOKENS_PER_STEP
    prefill_chunk: int | None = PREFILL_CHUNK
    paths: TokenPaths | None = None
    known: bool = False
    resident: Callable[[], Mask] | None = None
    costs: Callable[[], StepCosts] = lambda: UNKNOWN_COSTS

    def limits(self, policy: BatchPolicy) -> BatchLimits:
        if self.concurrent < 1:
            raise InvalidConfig("concurrent", self.concurrent, "at least 1")
        return BatchLimits(
            self.tokens_per_step,
            self.concurrent,
            kv_total=self.concurrent,
            prefill_chunk=self.prefill_chunk,
            rows_per_forward=self.rows_per_forward,
            plans_rounds=policy.plans_rounds,
        )


def scheduled_steps(
    trace: RoutingTrace, policy: BatchPolicy, scheduling: Scheduling, *, tokens: int | None = None
) -> Iterator[ScheduledStep]:
    """The steps that ``policy`` decides, until every sequence has ended or ``tokens`` rows have run.

    All sequences wait from the start. A sequence whose rows are all of the answer, as its prompt was not recorded,
    begins with its first decode row. What foretells paths is told of each step's picks, and then of the sequences that
    ended with it, when the next step is asked for: whoever runs the steps tells it nothing. Raises InvalidConfig for
    limits that can not work, TraceError where paths are to be foretold and tokens were not recorded.
    """
    if scheduling.paths is not None and trace.token is None:
        raise TraceError("this trace has no tokens, by which paths are foretold")
    replay = _Replay(trace, policy, scheduling)
    left = trace.tokens if tokens is None else tokens
    while left > 0 and (round_ := replay.round()):
        for step in round_:
            if left <= 0:
                return
            yield step
            replay.ran(step.step)
            left -= len(step.step.sequences)


def true_paths(trace: RoutingTrace, rows: Ids) -> Scores:
    """``[T, N]``: 1 for what these rows of the trace picked."""
    catalogue = trace.catalogue()
    picks = trace.experts[rows].astype(np.int64)
    found: Scores = np.zeros((len(rows), catalogue.size), dtype=np.float32)
    places, layers, choices = np.nonzero(picks < catalogue.experts_per_layer[:, None])
    found[places, catalogue.first[layers] + picks[places, layers, choices]] = 1
    return found


class _Replay:
    """``_next``: each running sequence's next row. A sequence's prompt is its first rows that are no decode rows.

    A policy is told of a prompt's rows up to where the phase changes: an encoder's rows and the decoder's prompt run in
    forwards of their own.
    """

    def __init__(self, trace: RoutingTrace, policy: BatchPolicy, scheduling: Scheduling) -> None:
        self._trace = trace
        self._policy = policy
        self._scheduling = scheduling
        self._limits = scheduling.limits(policy)
        self._starts: list[int] = trace.seq_starts.tolist()
        self._prompt = [self._prompt_rows(number) for number in range(trace.sequences)]
        self._waiting = deque(n for n in range(trace.sequences) if self._starts[n] < self._starts[n + 1])
        self._next: dict[int, int] = {}
        self._begun: set[int] = set()

    def round(self) -> list[ScheduledStep]:
        """The forwards of the next decision; none: all have ended."""
        self._admit_decoding()
        if not self._next and not self._waiting:
            return []
        foretold = self._foretell(list(self._next))
        resident = self._scheduling.resident
        decision = self._policy.decide(
            BatchState(
                waiting=tuple(WaitingSequence(n, self._prefill_left(n), 1) for n in self._in_line()),
                running=tuple(RunningSequence(n, self._prefill_left(n)) for n in self._next),
                kv_free=self._limits.max_running - len(self._next),
                limits=self._limits,
                costs=self._scheduling.costs(),
                paths=foretold if self._policy.reads_paths else None,
                resident=None if resident is None else resident(),
            )
        )
        for number in decision.admit:
            self._waiting.remove(number)
            self._next[number] = self._starts[number]
            self._started += (number,)
        steps = [self._step(plan.rows, foretold) for plan in decision.steps]
        ahead = [*steps[1:], None]
        return [replace(step, following=following) for step, following in zip(steps, ahead, strict=True)]

    def ran(self, step: TraceStep) -> None:
        """These rows have run."""
        paths = self._scheduling.paths
        asked = np.isin(step.sequences, list(self._begun))
        if paths is None or step.positions is None or not asked.any():
            return
        paths.picked(step.sequences[asked], step.positions[asked], step.picks[asked])
        for number in step.ended:
            if number in self._begun:
                self._begun.remove(number)
                paths.end(number)

    def _in_line(self) -> list[int]:
        """The first that wait, up to one that has no prompt: it starts as soon as there is room."""
        first = itertools.islice(self._waiting, self._limits.max_running)
        return list(itertools.takewhile(lambda number: self._prompt[number], first))

    def _prompt_rows(self, number: int) -> int:
        if self._trace.phase is None:
            return 0
        own = self._trace.phase[self._starts[number] : self._starts[number + 1]] == Phase.DECODE
        return int(own.argmax()) if own.any() else len(own)

    def _prefill_left(self, number: int) -> int:
        """Rows of the prompt in one phase, from its next one on. 0: it decodes."""
        row = self._next.get(number, self._starts[number])
        left = self._starts[number] + self._prompt[number] - row
        if left <= 0 or self._trace.phase is None:
            return 0
        other = self._trace.phase[row : row + left] != self._trace.phase[row]
        return int(other.argmax()) if other.any() else left

    def _admit_decoding(self) -> None:
        """Sequences without a recorded prompt run at once, as there is room."""
        self._started: tuple[int, ...] = ()
        while self._waiting and len(self._next) < self._limits.max_running and not self._prompt[self._waiting[0]]:
            number = self._waiting.popleft()
            self._next[number] = self._starts[number]
            self._started += (number,)

    def _foretell(self, numbers: Sequence[int]) -> SequencePaths | None:
        """Of the next rows of those that decode."""
        decoding = np.array([n for n in numbers if not self._prefill_left(n)], dtype=np.int64)
        rows = np.array([self._next[n] for n in decoding.tolist()], dtype=np.int64)
        chances = self._chances(decoding, rows)
        return None if chances is None else SequencePaths(decoding, chances)

    def _chances(self, sequences: Ids, rows: Ids) -> Scores | None:
        if self._scheduling.known and len(rows):
            return true_paths(self._trace, rows)
        paths, token = self._scheduling.paths, self._trace.token
        if paths is None or token is None or not len(rows):
            return None
        for number in dict.fromkeys(sequences.tolist()):
            if number not in self._begun:
                start = self._starts[number]
                paths.begin(number, token[start : start + self._prompt[number]].astype(np.int64))
                self._begun.add(number)
        return paths.chances(sequences, rows - self._trace.seq_starts[sequences], token[rows].astype(np.int64))

    def _step(self, plan: Sequence[Rows], foretold: SequencePaths | None) -> ScheduledStep:
        trace = self._trace
        counts = [part.tokens for part in plan]
        sequences = np.repeat(np.array([part.sequence for part in plan], dtype=np.int64), counts)
        begins = [self._next[part.sequence] for part in plan]
        rows = np.concatenate([np.arange(b, b + count) for b, count in zip(begins, counts, strict=True)])
        paths = self._paths_of(plan, sequences, rows, foretold)
        phases = np.full(len(rows), Phase.DECODE, dtype=np.uint8) if trace.phase is None else trace.phase[rows]
        ended = []
        for part in plan:
            self._next[part.sequence] += part.tokens
            if self._next[part.sequence] == self._starts[part.sequence + 1]:
                ended.append(part.sequence)
                del self._next[part.sequence]
        own = set(sequences.tolist())
        started = tuple(number for number in self._started if number in own)
        tokens = None if trace.token is None else trace.token[rows].astype(np.int64)
        positions = rows - trace.seq_starts[sequences]
        step = TraceStep(sequences, trace.experts[rows], phases, started, tuple(ended), tokens, positions)
        return ScheduledStep(step, paths)

    def _paths_of(
        self, plan: Sequence[Rows], sequences: Ids, rows: Ids, foretold: SequencePaths | None
    ) -> Scores | None:
        """Decode rows' as they were foretold before the decision, prompt rows' now."""
        if self._scheduling.paths is None and not self._scheduling.known:
            return None
        row_of = {} if foretold is None else {n: row for row, n in enumerate(foretold.sequences.tolist())}
        prompt = np.repeat([part.phase is not Phase.DECODE for part in plan], [part.tokens for part in plan])
        asked = self._chances(sequences[prompt], rows[prompt])
        known: Scores | list[float] = (
            [] if foretold is None else foretold.chances[[row_of[n] for n in sequences[~prompt].tolist()]]
        )
        if asked is None:
            return np.asarray(known, dtype=np.float32)
        found = np.empty((len(rows), asked.shape[1]), dtype=np.float32)
        found[prompt] = asked
        if not prompt.all():
            found[~prompt] = known
        return found
