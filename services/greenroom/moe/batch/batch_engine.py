"""Continuous batching, one step at a time: schedule, run, postprocess.

It has no thread and no queue; BatchLoop adds those. Scheduling by iteration follows Orca (Yu et al., OSDI 2022, §3.1).
Prefill in chunks beside decode follows Sarathi-Serve (Agrawal et al., OSDI 2024, §4.2).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError, InvalidConfig
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest
from greenroom.experts.copying.device_errors import is_out_of_memory, raise_if_fatal
from greenroom.moe.attention.kv_cache import KVMemoryError, KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_stats import BatchStats
from greenroom.moe.batch.device_sampling import sample_together
from greenroom.moe.batch.kv_needs import KVNeeds
from greenroom.moe.batch.logit_changes import UnusableChanges
from greenroom.moe.batch.prompt_logprobs import scored_parts
from greenroom.moe.batch.queue_description import QueueDescription
from greenroom.moe.batch.request_limits import RequestLimits
from greenroom.moe.batch.sampling import SampledToken
from greenroom.moe.batch.sampling import sample as sample_in_ram
from greenroom.moe.batch.sequence import OnEvent, Sequence, StopCheckerFactory
from greenroom.moe.batch.sequence_observer import SequenceObserver
from greenroom.moe.batch.step_meter import ExpertMoves, StepMeter
from greenroom.moe.batch.step_paths import Part, StepPaths
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.kernels.device_copies import to_device
from greenroom.policies.base.answer_lengths import AnswerLengths
from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.events import Phase, SequenceEnd
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import (
    UNKNOWN_COSTS,
    BatchPolicy,
    BatchState,
    Rows,
    StepPlan,
    WaitingSequence,
)
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.batching.preemption import MOST_PREEMPTIONS

log = logging.getLogger(__name__)

_NO_KV_MEMORY = "ask for fewer tokens (max_tokens); whoever runs the server can give less to --expert-memory"
_NO_STEP_MEMORY = (
    "there was not memory enough to compute it; whoever runs the server can give less to --expert-memory or"
    " --kv-memory, or fewer rows to a step (--tokens-per-step)"
)
_ENDS = {FinishReason.CANCELLED: SequenceEnd.CANCELLED, FinishReason.FAILED: SequenceEnd.FAILED}


class AuditError(GreenroomError):
    """The batch engine's state contradicts itself: a defect of greenroom."""


class BatchEngine:
    """The requests that wait and run on one model.

    ``new_sequence`` and ``snapshot`` may be called from any thread, everything else from the thread that steps.
    ``stop_checkers`` makes the checker of a request's stop strings. Without it requests with stop strings are refused.
    ``moves``: what moves experts, for what the policy is told of a step's cost. ``paths``: what foretells routing paths
    from tokens; asked once a row, for the policy and for the forward. ``lengths``: how long answers are expected to be;
    learnt from those that end here.

    Invariants, checked by ``audit``: A request waits or runs, never both. Exactly the running requests have a KV
    reservation. Exactly those without room for another row are to grow. None was preempted more often than it may be.
    The batch policy's descriptions of all requests are up to date. A request gets exactly one Finished, and is
    forgotten then.
    """

    def __init__(
        self,
        model: RaggedModel,
        config: BatchConfig,
        policy: BatchPolicy | None = None,
        *,
        eos_token_ids: Collection[int] = (),
        stop_checkers: StopCheckerFactory | None = None,
        observer: SequenceObserver | None = None,
        moves: ExpertMoves | None = None,
        paths: TokenPaths | None = None,
        picks: Callable[[], NDArray[np.integer] | None] | None = None,
        on_ended: Callable[[Sequence], None] | None = None,
        lengths: AnswerLengths | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.config = config
        self.policy = policy or FcfsBatching()
        if config.plans_rounds and not self.policy.plans_rounds:
            allowed = "false: this batch policy runs no more sequences than a forward has rows"
            raise InvalidConfig("plans_rounds", config.plans_rounds, allowed)
        self.kv = KVStore(model.layout, config.kv_budget_bytes)
        self._requests = RequestLimits(model, config, self.kv, stops=stop_checkers is not None)
        self.stats = BatchStats(kv_budget_bytes=config.kv_budget_bytes)
        self.waiting: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self._scoring: set[int] = set()  # of the running ones, those whose prompts are being scored
        self.on_ended = on_ended
        self.between_forwards: Callable[[], None] | None = None
        """Called between two forwards that were planned together."""
        self.needs = KVNeeds(self.kv, AnswerLengths() if lengths is None else lengths)
        """What sequences are expected to need, which decides who is admitted."""
        self._described = QueueDescription(self.needs)
        self._full: dict[int, Sequence] = {}  # those that run and have no room for another row
        self._limits = config.limits(config.kv_budget_bytes)
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_checkers = stop_checkers
        self._observer = observer
        self.costs = UNKNOWN_COSTS
        """What the policy was told last."""
        self._moves = moves
        self._meter = StepMeter(moves)
        self._clock = clock
        self._paths = StepPaths(paths, self.stats, clock)
        self._picks = picks
        self._numbers = itertools.count()

    @property
    def max_model_len(self) -> int:
        """How many tokens a request may have, prompt and answer together."""
        return self._requests.max_model_len

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    # -- requests come and go ------------------------------------------------------------------------------------

    def admit_check(self, request: GenerationRequest) -> None:
        """Raises InvalidRequest, which names the field, for a request that can never be served here."""
        self._requests.check(request)

    def new_sequence(self, request: GenerationRequest, on_event: OnEvent) -> Sequence:
        """The request as a sequence with a new number, not waiting yet. Raises InvalidRequest as ``admit_check``."""
        self.admit_check(request)
        sampling = request.sampling
        return Sequence(
            next(self._numbers),
            request,
            on_event,
            limit=self.max_model_len - len(request.prompt_ids) if sampling.max_tokens is None else sampling.max_tokens,
            eos_token_ids=self._eos_token_ids,
            checker=self._stop_checkers(sampling) if sampling.stop and self._stop_checkers else None,
            now=self._clock(),
        )

    def add(self, sequence: Sequence) -> None:
        """Let it wait for admission. If its prefix has already ended the answer, or there is to be none, it ends at
        once, unless its prompt is to be scored."""
        sequence.expected_answer = self.needs.answer_tokens(sequence)
        self.waiting[sequence.number] = sequence
        self._described.waits(sequence)
        self.stats.submitted += 1
        if self._observer is not None:
            with self._observed():
                self._observer.sequence_queued(sequence.info)
        if sequence.request.prefix or sequence.limit == 0:
            try:
                reason = sequence.settle()
            except Exception as error:
                self._fail(sequence, error)
                return
            if sequence.settled_end is not None:
                self._described.waits(sequence)  # fewer rows of it run
            elif reason is not None:
                self._end(sequence, reason)

    def cancel(self, number: int) -> None:
        """End a request that waits or runs. Does nothing if it has already ended."""
        sequence = self.waiting.get(number) or self.running.get(number)
        if sequence is not None:
            self._end(sequence, FinishReason.CANCELLED)

    def swap_paths(self, paths: TokenPaths | None) -> None:
        """Have routing paths foretold by this one from now on. To be called between steps."""
        self._paths.swap(paths)

    def abort(self, error: str) -> None:
        """Fail all requests."""
        for sequence in [*self.waiting.values(), *self.running.values()]:
            self._end(sequence, FinishReason.FAILED, error)

    # -- the step ------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run what the policy decides. False: it decides nothing. An error of one request ends that request alone.

        Raises ModelBroken, which ends no single request, if a mover has died or the device is lost.
        """
        plans = self._schedule()
        for plan, following in itertools.zip_longest(plans, plans[1:]):
            stats = self.stats
            if plan is not plans[0] and self.between_forwards is not None:
                self.between_forwards()
            if following is not None:
                self._tell_plan(following, plan)
            isolated, prefill, decode = stats.isolated_steps, stats.prefill_rows, stats.decode_rows
            self._meter.begin()
            started = self._clock()
            for due, logits in self._run(plan):
                self._postprocess(self._score(due, logits))
            seconds = self._clock() - started
            stats.steps += 1
            stats.step_seconds += seconds
            if stats.isolated_steps == isolated:
                self._meter.end(
                    seconds, prefill_rows=stats.prefill_rows - prefill, decode_rows=stats.decode_rows - decode
                )
        return bool(plans)

    def _schedule(self) -> tuple[StepPlan, ...]:
        described = self._described
        self.costs = self._meter.costs()
        self._paths.begin_step()
        growing, expected = self._growing()
        state = BatchState(
            waiting=self._with_waits() if self.policy.reads_waits else described.waiting,
            running=described.running,
            kv_free=self.kv.unreserved_bytes,
            limits=self._limits,
            costs=self.costs,
            paths=self._paths.decoding(self.running.values()) if self.policy.reads_paths else None,
            resident=None if self._moves is None else self._moves.resident(),
            kv_expected=expected,
            growing=growing,
        )
        began = self._clock()
        decision = self.policy.decide(state)
        self.stats.decide_seconds += self._clock() - began
        for number, reason in decision.refuse:
            self._end(self.waiting[number], FinishReason.FAILED, reason)
        for number in decision.preempt:
            self._preempt(self.running[number])
        if growing:
            self._grow(decision.steps)
        for number in decision.admit:
            if not self._reserve(self.waiting[number]):
                break  # no later request overtakes it
        return tuple(map(self._bounded, decision.steps)) if self._scoring else decision.steps

    def _bounded(self, plan: StepPlan) -> StepPlan:
        """``plan`` with no more rows of logits than there is memory for: prompts that are scored get shorter chunks.

        The policy need not know: it sees what is left of each prompt, as after any step.
        """
        room = max(0, self.config.logit_rows - len(plan.rows))
        bounded = []
        for rows in plan.rows:
            sequence = self.running.get(rows.sequence)
            if sequence is not None and rows.phase is Phase.PREFILL and sequence.scores_left:
                rows = replace(rows, tokens=min(rows.tokens, 1 + room))
                room -= rows.tokens - 1
            bounded.append(rows)
        return StepPlan(tuple(bounded))

    def _growing(self) -> tuple[dict[int, int], int]:
        """What the next row takes of each running sequence that has no room for it; and what all that run are expected
        to take, these rows at least. All that is left, where memory for another one can not be had.

        Of those without room it is reckoned anew how long their answers will be: some have outlived what was expected.
        """
        growing: dict[int, int] = {}
        for number, sequence in self._full.items():
            if sequence.kv is not None:
                self._expect(sequence)
                growing[number] = self.kv.growth_bytes(sequence.kv)
        expected = self._described.kv_expected
        for number, nbytes in growing.items():
            expected += max(0, nbytes - self._described.expected_of(number))
        return growing, max(expected, self.kv.unreserved_bytes) if self.kv.short else expected

    def _expect(self, running: Sequence) -> None:
        """Reckon anew how long its answer will be."""
        running.expected_answer = self.needs.answer_tokens(running)
        self._described.expects(running)

    def _grow(self, plans: tuple[StepPlan, ...]) -> None:
        """Make room for the rows of the plans. Raises ValueError where the policy has planned more than there is."""
        planned = {rows.sequence for plan in plans for rows in plan.rows}
        for number, sequence in list(self._full.items()):
            if number in planned and sequence.kv is not None:
                self.kv.grow(sequence.kv)
                del self._full[number]
                self._described.runs(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """It gives up its KV, and waits where it would by its arrival."""
        kv, number = sequence.kv, sequence.number
        if kv is None:
            raise ValueError(f"sequence {number} has no KV to give up")
        log.info("request %s gives up %d rows of KV for others", sequence.request.request_id, kv.length)
        del self.running[number]
        self._full.pop(number, None)
        self._scoring.discard(number)
        self._paths.end(number)
        sequence.preempt()
        self.kv.release(kv)
        self.stats.preemptions += 1
        if self._observer is not None:
            with self._observed():
                self._observer.sequence_preempted(sequence.info)
        sequence.expected_answer = self.needs.answer_tokens(sequence)
        self.waiting[number] = sequence
        self.waiting = dict(sorted(self.waiting.items()))
        self._described.waits_again(sequence)

    def _with_waits(self) -> tuple[WaitingSequence, ...]:
        places = self._limits.max_running - len(self.running)
        return self._described.waiting_at(self._clock(), max(0, places))

    def _reserve(self, sequence: Sequence) -> bool:
        """Start it. False: it goes on waiting until a running request gives memory back.

        If none runs, no memory will come back, so the request fails.
        """
        try:
            sequence.kv = self.kv.reserve(self.needs.first_rows(sequence), sequence.kv_rows)
        except KVMemoryError as error:
            self.stats.kv_shortages += 1
            if self.kv.short:
                log.warning("request %s waits for another one's end: %s", sequence.request.request_id, error)
                return False
            self._end(sequence, FinishReason.FAILED, f"{error}: {_NO_KV_MEMORY}")
        except Exception as error:
            self._fail(sequence, error)
        else:
            self._start(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        self.running[sequence.number] = self.waiting.pop(sequence.number)
        if sequence.scores_left:
            self._scoring.add(sequence.number)
        self._described.runs(sequence)
        if sequence.started_at is None:
            sequence.started_at = self._clock()
            self.stats.started += 1
            self.stats.queue_seconds += sequence.started_at - sequence.submitted_at
        if self._observer is not None:
            with self._observed():
                self._observer.sequence_started(sequence.info)

    def _run(self, plan: StepPlan) -> list[tuple[_Due, torch.Tensor]]:
        """The sequences that wanted logits, with these.

        If the forward fails, each sequence's rows run alone, and a failure then fails only their request. An expert
        that can not be read, for example, costs only the request that needs it.
        """
        pairs = [(self.running[rows.sequence], rows) for rows in plan.rows if rows.sequence in self.running]
        if not pairs:
            return []
        paths = self._paths.rows([Part(sequence, rows.tokens) for sequence, rows in pairs])
        try:
            return [self._forward(pairs, paths)]
        except Exception as error:
            raise_if_fatal(error)
            if len(pairs) == 1:
                self._fail(pairs[0][0], error)
                return []
            log.warning("a step of %d requests failed, each runs again alone: %s", len(pairs), error)
        self.stats.isolated_steps += 1
        due: list[tuple[_Due, torch.Tensor]] = []
        start = 0
        for sequence, rows in pairs:
            own = None if paths is None else paths[start : start + rows.tokens]
            start += rows.tokens
            try:
                due.append(self._forward([(sequence, rows)], own))
            except Exception as error:
                self._fail(sequence, error)
        return due

    def _tell_plan(self, following: StepPlan, plan: StepPlan) -> None:
        """Tell the model of the forward that follows the one of ``plan``, which is about to run."""
        ahead = {rows.sequence: rows.tokens for rows in plan.rows}
        pairs = [(self.running[rows.sequence], rows) for rows in following.rows if rows.sequence in self.running]
        if not pairs or not any(rows.sequence in self.running for rows in plan.rows):
            return  # the one that is about to run has lost all its rows: the following one is the next
        parts = [Part(sequence, rows.tokens, ahead.get(sequence.number, 0)) for sequence, rows in pairs]
        in_order = not any(part.ahead for part in parts)
        paths = self._paths.rows(parts) if in_order else None  # a sequence's rows are asked for in their order
        with self._observed():
            chunks = [_chunk(part.sequence, rows, part.ahead) for part, (_, rows) in zip(parts, pairs, strict=True)]
            self.model.plan([chunk for chunk in chunks if chunk.tokens], paths)

    def _forward(self, pairs: list[tuple[Sequence, Rows]], paths: Scores | None) -> tuple[_Due, torch.Tensor]:
        chunks = [_chunk(sequence, rows) for sequence, rows in pairs]
        logits = self.model.forward(chunks) if paths is None else self.model.forward(chunks, paths)
        if self._picks is not None and (picks := self._picks()) is not None:
            self._paths.ran([Part(sequence, rows.tokens) for sequence, rows in pairs], picks)
        for (sequence, _), chunk in zip(pairs, chunks, strict=True):
            kv = chunk.kv
            if kv.length < sequence.ran:
                self.stats.recomputed_rows += min(len(chunk.tokens), sequence.ran - kv.length)
            kv.commit(len(chunk.tokens))
            if kv.length == kv.capacity:
                self._full[sequence.number] = sequence
            if chunk.prefill:
                self._described.runs(sequence)
        prefill = sum(len(chunk.tokens) for chunk in chunks if chunk.prefill)
        self.stats.prefill_rows += prefill
        self.stats.decode_rows += sum(len(chunk.tokens) for chunk in chunks) - prefill
        return [
            (sequence, chunk) for (sequence, _), chunk in zip(pairs, chunks, strict=True) if chunk.wants_logits
        ], logits

    def _score(self, due: _Due, logits: torch.Tensor) -> _Drawn:
        """Score the prompts' rows among ``logits``. Returns the sequences that are due a token, with their logits.

        A request that has its answer already ends once its prompt is scored.
        """
        if not self._scoring:
            return [sequence for sequence, _ in due], logits
        drawing: list[Sequence] = []
        rows: list[int] = []
        for sequence, part in scored_parts(due):
            try:
                sequence.score(part.logprobs(sequence, logits))
            except Exception as error:
                self._fail(sequence, error)
                continue
            if not sequence.scores_left:
                self._scoring.discard(sequence.number)
            if part.samples:
                drawing.append(sequence)
                rows.append(part.stop - 1)
            elif sequence.settled_end is not None and not sequence.scores_left:
                self._end(sequence, sequence.settled_end)
        return drawing, logits.index_select(0, to_device(torch.tensor(rows, dtype=torch.int64), logits.device))

    def _postprocess(self, due: _Drawn) -> None:
        sequences, logits = due
        for sequence, picked in zip(sequences, _sample(sequences, logits), strict=True):
            if isinstance(picked, Exception):
                self._fail(sequence, picked)
                continue
            try:
                token, reason = sequence.accept(picked)
            except Exception as error:
                self._fail(sequence, error)
                continue
            self.stats.generated_tokens += 1
            if not _deliver(sequence, token):
                self._end(sequence, FinishReason.CANCELLED)
            elif reason is not None:
                self._end(sequence, reason)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        """Raises ModelBroken if the error means that the device is lost."""
        raise_if_fatal(error)
        if is_out_of_memory(error):
            log.warning("request %s failed: %s", sequence.request.request_id, error)
            self._end(sequence, FinishReason.FAILED, _NO_STEP_MEMORY)
        elif isinstance(error, GreenroomError):
            log.warning("request %s failed: %s", sequence.request.request_id, error)
            self._end(sequence, FinishReason.FAILED, str(error), invalid=isinstance(error, UnusableChanges))
        else:
            log.error("request %s failed by a defect", sequence.request.request_id, exc_info=error)
            self._end(sequence, FinishReason.FAILED, f"internal error ({type(error).__name__})")

    def _end(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, *, invalid: bool = False
    ) -> None:
        """``invalid``: the request is at fault."""
        if self.waiting.pop(sequence.number, None) is None:
            del self.running[sequence.number]
        self._described.left(sequence.number)
        self._full.pop(sequence.number, None)
        self._scoring.discard(sequence.number)
        self._paths.end(sequence.number)
        approximated, prefilled = 0.0, sequence.prefilled
        if sequence.kv is not None:
            if self._observer is not None:
                with self._observed():
                    approximated = self._observer.approximated(sequence.number, sequence.kv.length)
            self.kv.release(sequence.kv)
            sequence.kv = None
        self.stats.finished[reason] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.limit:
            self._learn(sequence, cut=reason is FinishReason.LENGTH)
        if self._observer is not None:
            with self._observed():
                self._observer.sequence_ended(sequence.number, _ENDS.get(reason, SequenceEnd.FINISHED))
        if self.on_ended is not None:
            self.on_ended(sequence)
        until = self._clock() if sequence.started_at is None else sequence.started_at
        queued = until - sequence.submitted_at
        finished = Finished(
            reason,
            sequence.prompt_tokens,
            sequence.generated,
            error,
            queued,
            approximated,
            invalid=invalid,
            prefilled=prefilled,
            prompt_logprobs=None if reason in _ENDS else sequence.prompt_logprobs,
        )
        _deliver(sequence, finished)

    def _learn(self, sequence: Sequence, *, cut: bool) -> None:
        """How long its answer was. What the others are expected to need may change with it. ``cut``: at its limit."""
        lengths = self.needs.lengths
        changes = lengths.changes
        lengths.finished(sequence.info.task, sequence.generated, cut=cut)
        if lengths.changes == changes:
            return
        for waiting in self.waiting.values():
            waiting.expected_answer = self.needs.answer_tokens(waiting)
            self._described.waits(waiting)
        for running in self.running.values():
            self._expect(running)

    @contextlib.contextmanager
    def _observed(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.stats.observer_failures += 1
            log.exception("an observer of sequences failed")

    # -- state --------------------------------------------------------------------------------------------------

    def snapshot(self) -> BatchStats:
        """The counts now. Read from another thread, they may be from slightly different moments."""
        self.stats.waiting = len(self.waiting)
        self.stats.running = len(self.running)
        self.stats.kv_reserved_bytes = self.kv.reserved_bytes
        self.stats.kv_free_bytes = self.kv.free_bytes
        self.stats.kv_peak_bytes = self.kv.peak_bytes
        return self.stats.snapshot()

    def rest(self) -> None:
        """No request waits or runs: memory that is kept for the next ones is given back. Then as ``audit``."""
        self.kv.give_back()
        self.audit()

    def idle(self) -> bool:
        """No request waits or runs. True: the observer has more background work."""
        return self._observer is not None and self._observer.idle()

    def audit(self) -> None:
        """Raises AuditError or KVAuditError, which names the invariant that does not hold."""
        self.kv.audit()
        if both := self.waiting.keys() & self.running.keys():
            raise AuditError(f"sequences {sorted(both)} wait and run")
        if any(sequence.kv is not None for sequence in self.waiting.values()):
            raise AuditError("a waiting sequence holds KV")
        held = {id(sequence.kv) for sequence in self.running.values() if sequence.kv is not None}
        if len(held) != len(self.running) or len(self.kv) != len(self.running):
            raise AuditError(f"{len(self.running)} sequences run, {len(held)} hold KV, {len(self.kv)} are reserved")
        for sequence in self.running.values():
            if sequence.kv is not None and not sequence.kv.length < len(sequence.tokens):
                raise AuditError(f"sequence {sequence.number} has {sequence.kv.length} rows of {len(sequence.tokens)}")
        full = {one.number for one in self.running.values() if one.kv is not None and one.kv.length == one.kv.capacity}
        if full != self._full.keys():
            raise AuditError(f"sequences {sorted(full)} have no room for another row, not {sorted(self._full)}")
        often = [one for one in (*self.waiting.values(), *self.running.values()) if one.preempted > MOST_PREEMPTIONS]
        if often:
            raise AuditError(f"sequence {often[0].number} was preempted {often[0].preempted} times")
        if not self._described.describes(self.waiting.values(), self.running.values()):
            raise AuditError("the policy is told of other sequences than those that are here")
        if self._observer is not None and not self.busy:
            self._observer.audit_idle()


_Due = list[tuple[Sequence, Chunk]]
"""Sequences whose chunks wanted logits."""

_Drawn = tuple[list[Sequence], torch.Tensor]
"""Sequences that are due a token, each with a row of logits."""


def _chunk(sequence: Sequence, rows: Rows, ahead: int = 0) -> Chunk:
    """``ahead``: rows of the sequence that run before these."""
    kv = sequence.kv
    if kv is None:
        raise ValueError(f"sequence {sequence.number} has a row in the step and no KV")
    start = kv.length + ahead
    stop = start + rows.tokens
    first = max(start, sequence.scores_from)
    scored = first < min(stop, sequence.scored_rows)
    return Chunk(
        sequence.number,
        sequence.tokens[start:stop],
        kv,
        prefill=rows.phase is Phase.PREFILL,
        wants_logits=scored or stop == len(sequence.tokens),
        logit_rows=stop - first if scored else 1,
    )


def _sample(sequences: list[Sequence], logits: torch.Tensor) -> list[SampledToken | Exception]:
    draws = [sequence.next_draw() for sequence in sequences]
    sample = sample_in_ram if logits.device.type == "cpu" else sample_together
    try:
        return list(sample(logits, draws))
    except Exception as error:
        raise_if_fatal(error)
        log.exception("sampling %d rows together failed, each is sampled alone", len(draws))
    picked: list[SampledToken | Exception] = []
    for row, draw in enumerate(draws):
        try:
            picked += sample(logits[row : row + 1], [draw])
        except Exception as error:
            picked.append(error)
    return picked


def _deliver(sequence: Sequence, event: Event) -> bool:
    try:
        sequence.on_event(event)
    except Exception:
        log.exception("request %s can not be told its events", sequence.request.request_id)
        return False
    return True
