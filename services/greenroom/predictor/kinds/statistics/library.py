"""What is known of all models, within a budget of bytes. No I/O."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from greenroom.core.messages import Trace
from greenroom.predictor.kinds.statistics.snapshot import Snapshot
from greenroom.predictor.kinds.statistics.statistics import Statistics
from greenroom.predictor.traces.counted_ids import CountedIds
from greenroom.predictor.traces.counts import BadTrace, SequenceCounts, Shape, shape_of

_ENTRY_BYTES = 2048
ALL_TASKS = ""


@dataclass(slots=True, eq=False)
class Knowledge:
    """One model. ``unsaved``: sequences since the last version."""

    model: str
    everything: Statistics
    tasks: dict[str, Statistics]
    seen: CountedIds
    unsaved: int = 0

    @property
    def shape(self) -> Shape:
        return self.everything.shape


@dataclass(frozen=True, slots=True)
class Evicted:
    """``task_type`` None: all of the model."""

    model: str
    task_type: str | None


class Library:
    """Knowledge of models by name.

    Statistics of a task type are made when its first sequence comes. All together take at most ``max_bytes``. Beyond
    that, the statistics go that were neither learnt from nor asked for in the longest time. A model's statistics over
    all task types are used with each of its types, so they go last, and the model with them.
    """

    def __init__(self, *, max_bytes: int, half_life_sequences: float, seen_window: int) -> None:
        """See PredictorConfig."""
        self._max_bytes = max_bytes
        self._half_life = half_life_sequences
        self._seen_window = seen_window
        self.models: dict[str, Knowledge] = {}
        self._entries: OrderedDict[tuple[str, str], int] = OrderedDict()
        self.nbytes = 0

    def check(self, trace: Trace) -> None:
        """Raises BadTrace where ``trace`` can not be of its model as it is known here, or is beyond any budget."""
        shape = shape_of(trace)
        # A model has at least two entries, and they must leave room for others.
        if 8 * (shape.nbytes + _ENTRY_BYTES) > self._max_bytes:
            raise BadTrace(
                f"{shape} take {shape.nbytes} bytes for each task type, too many for a budget of "
                f"{self._max_bytes} (max_bytes)"
            )
        known = self.models.get(trace.model)
        if known is not None and known.shape != shape:
            raise BadTrace(
                f"{shape}, and the model {trace.model!r:.100} was known with {known.shape}; serve another model under "
                "another name, or delete what is kept of this one"
            )

    def has_seen(self, model: str, request_id: str) -> bool:
        known = self.models.get(model)
        return known is not None and request_id in known.seen

    def learn(self, trace: Trace, counts: SequenceCounts) -> list[Evicted]:
        """Count one sequence, which must have been checked. Says what had to go for it."""
        known = self.models.get(trace.model)
        if known is None:
            known = Knowledge(trace.model, Statistics.empty(counts.shape), {}, CountedIds(self._seen_window))
            self.models[trace.model] = known
        if trace.task_type != ALL_TASKS:
            if trace.task_type not in known.tasks:
                known.tasks[trace.task_type] = Statistics.empty(counts.shape)
            known.tasks[trace.task_type].add(counts, self._half_life)
        known.everything.add(counts, self._half_life)
        known.seen.add(trace.request_id)
        known.unsaved += 1
        self._use(known, trace.task_type)
        return self._shrink()

    def touch(self, model: str, task_type: str) -> None:
        """It was asked for."""
        known = self.models.get(model)
        if known is not None:
            self._use(known, task_type)

    def snapshot(self, model: str, version: int = 0, now_ms: int = 0) -> Snapshot:
        """A copy of what is known of ``model`` now, as ``version``."""
        known = self.models[model]
        return Snapshot(
            model=model,
            version=version,
            created_ms=now_ms,
            everything=known.everything.copy(),
            tasks={name: statistics.copy() for name, statistics in known.tasks.items()},
            seen=known.seen.to_array(),
        )

    def restore(self, snapshot: Snapshot) -> list[Evicted]:
        """Go on from ``snapshot``, in place of what is known of its model."""
        self.forget(snapshot.model)
        known = Knowledge(
            snapshot.model,
            snapshot.everything.copy(),
            {name: statistics.copy() for name, statistics in snapshot.tasks.items()},
            CountedIds.from_array(snapshot.seen, self._seen_window),
        )
        self.models[snapshot.model] = known
        for name in known.tasks:
            self._use(known, name)
        self._use(known, ALL_TASKS)
        return self._shrink()

    def forget(self, model: str) -> None:
        known = self.models.pop(model, None)
        if known is not None:
            for name in (*known.tasks, ALL_TASKS):
                self.nbytes -= self._entries.pop((model, name), 0)

    def _use(self, known: Knowledge, task_type: str) -> None:
        for name in (task_type, ALL_TASKS):
            if name != ALL_TASKS and name not in known.tasks:
                continue
            key = (known.model, name)
            if key not in self._entries:
                self._entries[key] = known.shape.nbytes + _ENTRY_BYTES
                self.nbytes += self._entries[key]
            self._entries.move_to_end(key)

    def _shrink(self) -> list[Evicted]:
        gone: list[Evicted] = []
        while self.nbytes > self._max_bytes:
            (model, task_type), size = self._entries.popitem(last=False)
            self.nbytes -= size
            if task_type == ALL_TASKS:
                del self.models[model]
                gone.append(Evicted(model, None))
            else:
                del self.models[model].tasks[task_type]
                gone.append(Evicted(model, task_type))
        return gone

    def audit(self) -> None:
        """Raises AssertionError where the books do not agree."""
        expected = {(model, ALL_TASKS) for model in self.models}
        expected |= {(model, name) for model, known in self.models.items() for name in known.tasks}
        assert set(self._entries) == expected
        assert self.nbytes == sum(self._entries.values()) <= self._max_bytes
        for known in self.models.values():
            for statistics in (known.everything, *known.tasks.values()):
                assert statistics.shape == known.shape
                statistics.audit()
            assert all(one.sequences <= known.everything.sequences for one in known.tasks.values())
