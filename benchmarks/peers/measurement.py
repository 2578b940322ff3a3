"""The measurement: trials that choose the peer's settings, then rounds in which all arms take turns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness.children.cgroups import NoCgroup
from benchmarks.harness.children.greenroom_child import parse_policy
from benchmarks.harness.children.processes import ArmFailed
from benchmarks.harness.disk import ReadAhead
from benchmarks.peers import gguf_file
from benchmarks.peers.arms import Answer, Arm
from benchmarks.peers.batch import Batch
from benchmarks.peers.llama_settings import (
    AS_STORED,
    LlamaSettings,
    best_of,
    first_trials,
    in_place,
    memory_trials,
    second_trials,
    waiting_trials,
)
from benchmarks.peers.results import GREENROOM, LLAMA, RESIDENT, SAME_TOTAL, STREAMING, THIRD, Row, Sample, agreement
from benchmarks.peers.streaming_peer import StreamingPeer
from benchmarks.peers.streaming_settings import StreamingSettings, lane_trials, single_changes

MAX_MODEL_LEN = 256
AMPLE_BYTES = 64 * 2**30
"""A limit that limits nothing."""


@dataclass(frozen=True)
class Effort:
    """How much is measured. ``tokens``: forced after each prompt, by situation and number of sequences.

    The first ``skip`` of them are not timed.
    """

    rounds: int = 3
    trials: int = 2
    skip: int = 6
    prompt_tokens: int = 32
    tokens: Mapping[tuple[str, int], int] = field(
        default_factory=lambda: {(RESIDENT, 1): 64, (RESIDENT, 8): 32, (THIRD, 1): 56, (THIRD, 8): 24}
    )
    trial_tokens: Mapping[tuple[str, int], int] = field(
        default_factory=lambda: {(RESIDENT, 1): 40, (RESIDENT, 8): 20, (THIRD, 1): 24, (THIRD, 8): 14}
    )
    tune: bool = True


@dataclass
class Subject:
    """A model under measurement: the folder of a checkpoint in bf16, of which GGUF files are made for the peer, or the
    GGUF file that both read. ``stream``: the eight sequences that are forced on every arm."""

    name: str
    checkpoint: Path
    stream: Batch
    resident: dict[int, LlamaSettings] = field(default_factory=dict)
    short_of_memory: dict[int, LlamaSettings] = field(default_factory=dict)
    peer_own_bytes: dict[int, int] = field(default_factory=dict)
    """By the number of sequences, what a cgroup counts of llama.cpp beside the model: its process, KV and buffers."""
    plan: dict[str, Any] = field(default_factory=dict)
    """What greenroom announces at a third."""
    greedy: dict[tuple[str, int], tuple[tuple[int, ...], ...]] = field(default_factory=dict)
    streaming: StreamingSettings | None = None
    """What BigMoeOnEdge is measured with; None where it is not."""
    streaming_own_bytes: int | None = None
    """What it takes beside its cache of experts, its copy of the dense weights included."""
    streaming_agreement: float | None = None
    """The share of its greedy answer that llama.cpp would have picked too."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What the peer's file may have its matrices in."""
        return (AS_STORED,) if self.checkpoint.suffix == ".gguf" else gguf_file.DTYPES

    def gguf(self, dtype: str) -> Path:
        return self.checkpoint if dtype == AS_STORED else gguf_file.ensure(self.checkpoint, dtype)

    @property
    def dense_bytes(self) -> int:
        """Of the GGUF file all but the experts."""
        path = self.gguf(self.dtypes[0])
        return path.stat().st_size - gguf_file.expert_bytes(path)

    def peer_limit(self, sequences: int) -> int | None:
        """A cgroup size that gives llama.cpp the same bytes for experts as greenroom, beside all else that it needs."""
        if sequences not in self.peer_own_bytes or not self.plan:
            return None
        return self.peer_own_bytes[sequences] + self.dense_bytes + int(self.plan["expert_budget"])

    @property
    def expert_mib(self) -> int:
        """greenroom's budget at a third, in the unit of BigMoeOnEdge's."""
        return -(-int(self.plan["expert_budget"]) // 2**20)

    @property
    def streaming_limit(self) -> int | None:
        """The same for BigMoeOnEdge: what it takes itself, the bytes for experts, and the file, which it maps to load.
        It reads no expert from there later, and without room for these pages its first steps wait for them to go."""
        if self.streaming_own_bytes is None:
            return None
        return self.streaming_own_bytes + self.expert_mib * 2**20 + self.checkpoint.stat().st_size


class Measurement:
    """Runs arms, one process at a time, and keeps the results. A failure is kept in its row and ends nothing."""

    def __init__(
        self, ours: Arm, peer: Arm, effort: Effort, *, policy: str, expert_memory: str, threads: int, cgroups: bool,
        read_ahead: ReadAhead, bar: tqdm[Any], streaming: StreamingPeer | None = None,
    ) -> None:  # fmt: skip
        """``streaming``: BigMoeOnEdge, measured beside where memory is short."""
        self.ours, self.peer, self.effort, self.streaming = ours, peer, effort, streaming
        self.policy, self.expert_memory, self.threads = policy, expert_memory, threads
        self.cgroups, self.read_ahead, self.bar = cgroups, read_ahead, bar
        self.rows: dict[tuple[str, str, str, int], Row] = {}
        self.trials: list[dict[str, Any]] = []
        self.failures: list[str] = []
        """Of runs that are no rows: trials, and what had to be known before."""
        self.peer_version: dict[str, str] = {}

    # -- what the peer is measured with -----------------------------------------------------------------------------

    def prepare(self, subject: Subject) -> None:
        """Choose llama.cpp's settings by trials, and learn what both take beside the experts. Raises nothing."""
        self._learn_plan(subject)
        self._sample_stream(subject)
        start = LlamaSettings(dtype=subject.dtypes[0], threads=self.threads)
        firsts = first_trials(self.threads, subject.dtypes) if self.effort.tune else [start]
        rates = self._try(subject, RESIDENT, firsts, (1, 8))
        for sequences in (1, 8):
            best = best_of(rates[sequences]) or start
            if self.effort.tune:
                more = self._try(subject, RESIDENT, second_trials(best, sequences), (sequences,))
                best = best_of(more[sequences]) or best
            subject.resident[sequences] = best
        self._prepare_short_of_memory(subject)
        self._prepare_streaming(subject)

    def _learn_plan(self, subject: Subject) -> None:
        with self._reported(subject, f"{GREENROOM}, its plan", self.failures):
            subject.plan = self.ours.run(subject.checkpoint, [], self._ours(self.expert_memory)).told
        self.bar.update()

    def _prepare_short_of_memory(self, subject: Subject) -> None:
        if not self.cgroups:
            return
        own, settable = self.read_ahead.original, self.read_ahead.settable
        for sequences in (1, 8):
            self._learn_peer_own_bytes(subject, sequences)
            trials = memory_trials(subject.resident[sequences], own, settable)
            subject.short_of_memory[sequences] = trials[0]
            if self.effort.tune:
                rates = self._try(subject, THIRD, trials, (sequences,), repeats=1)
                best = best_of(rates[sequences]) or trials[0]
                waiting = self._try(subject, THIRD, waiting_trials(best, self.threads), (sequences,), repeats=1)
                tried = {best: rates[sequences][best], **waiting[sequences]}
                subject.short_of_memory[sequences] = best_of(tried) or best

    def _learn_peer_own_bytes(self, subject: Subject, sequences: int) -> None:
        """The peak of a run in a cgroup that limits nothing, less the file, which is read whole and counts there."""
        settings = in_place(subject.resident[sequences])
        batch = subject.stream.first(sequences, self.effort.trial_tokens[THIRD, sequences])
        with self._reported(subject, f"{LLAMA}, what it takes beside the model", self.failures):
            answer = self._run_peer(subject, settings, [batch], AMPLE_BYTES)
            if answer.cgroup_peak is None:
                raise ArmFailed("this kernel does not tell a cgroup's peak")
            counted = subject.gguf(settings.dtype).stat().st_size - answer.left_in_cache
            subject.peer_own_bytes[sequences] = max(0, answer.cgroup_peak - counted)
        self.bar.update()

    def _sample_stream(self, subject: Subject) -> None:
        """All are given what BigMoeOnEdge picks, since nothing can be forced on it."""
        peer = self.streaming
        if peer is None or not self.cgroups or not peer.reads(subject.checkpoint) or not subject.plan:
            return
        with self._reported(subject, f"{STREAMING}, what it picks", self.failures):
            subject.stream = peer.sampled(subject, self.effort.tokens[THIRD, 1])
            subject.streaming = StreamingSettings(threads=self.threads)
        self.bar.update()

    def _prepare_streaming(self, subject: Subject) -> None:
        """What it takes, its settings by trials, and whether it computes what llama.cpp does."""
        peer, tokens = self.streaming, self.effort.trial_tokens[THIRD, 1]
        if peer is None or subject.streaming is None:
            return
        with self._reported(subject, f"{STREAMING}, what it takes beside the experts", self.failures):
            subject.streaming_own_bytes = peer.own_bytes(subject, tokens, AMPLE_BYTES)
        self.bar.update()
        if self.effort.tune:
            lanes = self._try_streaming(peer, subject, lane_trials(self.threads))
            best = best_of(lanes) or subject.streaming
            more = self._try_streaming(peer, subject, single_changes(best))
            subject.streaming = best_of(more) or best
        with self._reported(subject, f"{STREAMING}, its greedy answer", self.failures):
            greedy = peer.greedy(subject, subject.streaming, tokens)
            answer = self._run_peer(subject, in_place(subject.resident[1]), [greedy], None)
            subject.streaming_agreement = round(agreement(answer.batches[0].greedy, greedy.forced), 4)
        self.bar.update()

    def _try_streaming(
        self, peer: StreamingPeer, subject: Subject, trials: Sequence[StreamingSettings]
    ) -> dict[StreamingSettings, list[float]]:
        """Tokens/s of each trial; they take turns."""
        rates: dict[StreamingSettings, list[float]] = {trial: [] for trial in trials}
        for _ in range(self.effort.trials):
            for trial in trials:
                with self._reported(subject, f"{STREAMING}, trial of {trial.describe()}", self.failures):
                    answer = peer.third(subject, trial, self.effort.trial_tokens[THIRD, 1])
                    rates[trial].append(answer.batches[0].rate(self.effort.skip))
                self.bar.update()
        for trial, values in rates.items():
            told = {"model": subject.name, "memory": THIRD, "sequences": 1, "engine": STREAMING}
            told["settings"] = trial.describe()
            self.trials.append({**told, "tokens_per_s": [round(value, 2) for value in values]})
        return rates

    def _try(
        self,
        subject: Subject,
        memory: str,
        trials: Sequence[LlamaSettings],
        numbers: Sequence[int],
        *,
        repeats: int | None = None,
    ) -> dict[int, dict[LlamaSettings, list[float]]]:
        """Tokens/s of each trial, by the number of sequences; the trials take turns."""
        rates: dict[int, dict[LlamaSettings, list[float]]] = {n: {trial: [] for trial in trials} for n in numbers}
        batches = [subject.stream.first(n, self.effort.trial_tokens[memory, n]) for n in numbers]
        for _ in range(repeats or self.effort.trials):
            for trial in trials:
                with self._reported(subject, f"{LLAMA}, {memory}, trial of {trial.describe()}", self.failures):
                    limit = subject.peer_limit(numbers[0]) if memory == THIRD else None
                    answer = self._run_peer(subject, trial, batches, limit)
                    for n, decoded in zip(numbers, answer.batches, strict=True):
                        rates[n][trial].append(decoded.rate(self.effort.skip))
                self.bar.update()
        for n, found in rates.items():
            for trial, values in found.items():
                told = {"model": subject.name, "memory": memory, "sequences": n, "settings": trial.describe()}
                self.trials.append({**told, "tokens_per_s": [round(value, 2) for value in values]})
        return rates

    # -- the rounds -------------------------------------------------------------------------------------------------

    def round(self, subjects: Sequence[Subject], number: int) -> None:
        """Every arm once on every model. The arm that begins changes from round to round."""
        for subject in subjects:
            turns: list[Callable[[], None]] = []
            for sequences in (1, 8):
                args = (subject, number, sequences)
                pair = [partial(self._resident_ours, *args), partial(self._resident_peer, *args)]
                turns += pair if number % 2 == 0 else pair[::-1]
            for sequences in (1, 8):
                args = (subject, number, sequences)
                arms = [partial(self._third_ours, *args), partial(self._third_peer, *args, THIRD)]
                if sequences == 1 and subject.streaming is not None:
                    arms.insert(1, partial(self._third_streaming, subject, number))
                turns += arms if number % 2 == 0 else arms[::-1]
                turns.append(partial(self._third_peer, *args, SAME_TOTAL))
            for turn in turns:
                turn()
                self.bar.update()

    def _resident_ours(self, subject: Subject, number: int, sequences: int) -> None:
        row = self._row(subject, GREENROOM, RESIDENT, sequences, "all experts in memory")
        with self._reported(subject, f"{GREENROOM}, {RESIDENT}, {sequences} at once", row.errors):
            answer = self.ours.run(subject.checkpoint, [self._batch(subject, RESIDENT, sequences)], self._ours("100%"))
            self._keep(subject, row, answer, number)

    def _resident_peer(self, subject: Subject, number: int, sequences: int) -> None:
        settings = subject.resident[sequences]
        row = self._row(subject, LLAMA, RESIDENT, sequences, settings.describe())
        with self._reported(subject, f"{LLAMA}, {RESIDENT}, {sequences} at once", row.errors):
            answer = self._run_peer(subject, settings, [self._batch(subject, RESIDENT, sequences)], None)
            self._keep(subject, row, answer, number)

    def _third_ours(self, subject: Subject, number: int, sequences: int) -> None:
        row = self._row(subject, GREENROOM, THIRD, sequences, f"policy {self.policy}")
        row.expert_budget = subject.plan.get("expert_budget")
        limit = int(subject.plan["announced"]) if self.cgroups and subject.plan else None
        with self._reported(subject, f"{GREENROOM}, {THIRD}, {sequences} at once", row.errors):
            batch = self._batch(subject, THIRD, sequences)
            answer = self.ours.run(
                subject.checkpoint, [batch], self._ours(self.expert_memory), limit_bytes=limit,
                cold=[subject.checkpoint],
            )  # fmt: skip
            row.own_bytes = answer.told["announced_base"]
            self._keep(subject, row, answer, number)

    def _third_peer(self, subject: Subject, number: int, sequences: int, memory: str) -> None:
        if not self.cgroups:
            return
        settings = subject.short_of_memory[sequences]
        if memory == SAME_TOTAL:  # where a copy of codes may fit
            settings = replace(settings, repack=subject.resident[sequences].repack)
        row = self._row(subject, LLAMA, memory, sequences, settings.describe())
        with self._reported(subject, f"{LLAMA}, {memory}, {sequences} at once", row.errors):
            limit = subject.peer_limit(sequences)
            if limit is None:
                raise ArmFailed("what it takes beside the experts is not known: the runs that tell failed")
            row.expert_budget, row.own_bytes = int(subject.plan["expert_budget"]), subject.peer_own_bytes[sequences]
            if memory == SAME_TOTAL:
                row.expert_budget, limit = None, int(subject.plan["announced"])
            answer = self._run_peer(subject, settings, [self._batch(subject, THIRD, sequences)], limit)
            self._keep(subject, row, answer, number)

    def _third_streaming(self, subject: Subject, number: int) -> None:
        peer, settings = self.streaming, subject.streaming
        assert peer is not None
        assert settings is not None
        row = self._row(subject, STREAMING, THIRD, 1, settings.describe())
        row.expert_budget, row.own_bytes = subject.expert_mib * 2**20, subject.streaming_own_bytes
        with self._reported(subject, f"{STREAMING}, {THIRD}", row.errors):
            self._keep(subject, row, peer.third(subject, settings, self.effort.tokens[THIRD, 1]), number)

    # -- one run ----------------------------------------------------------------------------------------------------

    def _run_peer(
        self, subject: Subject, settings: LlamaSettings, batches: Sequence[Batch], limit_bytes: int | None
    ) -> Answer:
        model = subject.gguf(settings.dtype)
        with self.read_ahead as read_ahead:
            if settings.read_ahead_kib is not None:
                read_ahead.set(settings.read_ahead_kib)
            answer = self.peer.run(
                model, batches, settings.job(MAX_MODEL_LEN), limit_bytes=limit_bytes,
                cold=[model] if limit_bytes is not None else [],
            )  # fmt: skip
        self.peer_version = {name: answer.told[name] for name in ("version", "system")}
        return answer

    def _ours(self, expert_memory: str) -> dict[str, Any]:
        """WorkerConfig's settings; KV and steps for what is measured, as llama.cpp has them."""
        name, options = parse_policy(self.policy)
        return {
            "expert_memory": expert_memory,
            "policy": name,
            "policy_options": options,
            "threads": self.threads,
            "max_model_len": MAX_MODEL_LEN,
            "max_running": 8,
            "warm_start": False,
            "progress": False,
        }

    def _batch(self, subject: Subject, memory: str, sequences: int) -> Batch:
        return subject.stream.first(sequences, self.effort.tokens[memory, sequences])

    def _row(self, subject: Subject, engine: str, memory: str, sequences: int, settings: str) -> Row:
        key = (subject.name, engine, memory, sequences)
        return self.rows.setdefault(key, Row(subject.name, engine, memory, sequences, settings))

    def _keep(self, subject: Subject, row: Row, answer: Answer, number: int) -> None:
        decoded = answer.batches[0]
        after_first = sum(len(times) - 1 for times in decoded.arrivals)
        row.samples.append(
            Sample(
                round=number,
                tokens_per_s=decoded.rate(self.effort.skip),
                prompt_s=decoded.prompt_s,
                load_s=answer.told["load_s"],
                peak_rss=answer.told["peak_rss"],
                read_bytes_per_token=decoded.read_bytes / after_first,
                base_rss=answer.told.get("base_rss"),
                cgroup_limit=answer.cgroup_limit,
                cgroup_peak=answer.cgroup_peak,
                hit_rate=answer.told.get("hit_rate"),
            )
        )
        if row.memory == RESIDENT:
            subject.greedy[row.engine, row.sequences] = decoded.greedy

    @contextmanager
    def _reported(self, subject: Subject, what: str, errors: list[str]) -> Iterator[None]:
        """An arm that fails is told of, kept in ``errors``, and does not end the run."""
        self.bar.set_postfix_str(f"{subject.name}: {what}")
        try:
            yield
        except (ArmFailed, NoCgroup, OSError, ValueError, KeyError) as error:
            errors.append(f"{what}: {error}" if errors is self.failures else str(error))
            tqdm.write(f"{subject.name}, {what} failed: {error}", file=sys.stderr)


def agreements(subjects: Sequence[Subject]) -> dict[str, float]:
    """By model, at how many of the forced positions both engines would have picked the same token."""
    found = {}
    for subject in subjects:
        ours, theirs = subject.greedy.get((GREENROOM, 8)), subject.greedy.get((LLAMA, 8))
        if ours is not None and theirs is not None:
            found[subject.name] = round(agreement(ours, theirs), 4)
    return found


def runs_of(subjects: Sequence[Subject], effort: Effort, streaming: StreamingPeer | None = None) -> int:
    """How many runs there will be at most, for the progress bar."""
    found = sum(_runs_of(subject, effort) for subject in subjects)
    if streaming is None:
        return found
    trials = len(lane_trials(2)) + len(single_changes(StreamingSettings(overlap=True))) if effort.tune else 0
    more = 3 + effort.trials * trials + effort.rounds
    return found + sum(more for subject in subjects if streaming.reads(subject.checkpoint))


def _runs_of(subject: Subject, effort: Effort) -> int:
    more = sum(len(second_trials(LlamaSettings(dtype=subject.dtypes[0]), n)) for n in (1, 8))
    trials = effort.trials * (len(first_trials(2, subject.dtypes)) + more) + 16
    return 1 + (trials if effort.tune else effort.trials + 2) + 10 * effort.rounds
