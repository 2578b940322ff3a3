"""Policies × budgets × concurrency on one trace: which suits this routing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import parse_bytes
from greenroom.policies.belady import Belady, Future
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.expert_policy import ExpertPolicy
from greenroom.policies.registry import create_policy
from greenroom.replay.cache import ReplayResult, optimum, replay
from greenroom.replay.steps import TraceStep, groups
from greenroom.replay.trace import RoutingTrace
from greenroom.replay.trace_file import TraceError

if TYPE_CHECKING:
    from greenroom.replay.timed import TimedReplay, TimedResult

BELADY = "belady"
Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by name, with its options; ``label`` is how it was written."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """``decayed`` or ``decayed:alpha=0.999,…``, values as in JSON. Raises InvalidConfig, naming the policy."""
        name, _, rest = text.partition(":")
        options: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            option, separator, value = part.partition("=")
            if not separator:
                raise InvalidConfig("policy", text, "write options as NAME:OPTION=VALUE,OPTION=VALUE")
            try:
                options[option.strip()] = json.loads(value)
            except ValueError:
                options[option.strip()] = value.strip()
        return cls(name.strip(), options, text.strip())

    def create(self, catalogue: Catalogue, steps: Callable[[], Iterator[TraceStep]]) -> ExpertPolicy:
        """A new one; Belady's oracle is told what ``steps`` will use. Raises UnknownName, InvalidConfig."""
        if self.name != BELADY:
            return create_policy(self.name, catalogue=catalogue, options=self.options)
        future = Future.of_groups(groups(catalogue, steps()))
        policy = create_policy(BELADY, catalogue=catalogue, options={**self.options, "future": future})
        assert isinstance(policy, Belady)
        return policy


def slots_of(text: str, catalogue: Catalogue, expert_bytes: int | None, *, field: str = "budget") -> int:
    """A budget as a number of experts: ``96``, a share such as ``25%``, or bytes such as ``2GiB``.

    Raises InvalidConfig, naming ``field``: for bytes, too, where the size of an expert is not known.
    """
    if text.strip().isdigit():
        slots = int(text)
    elif text.strip().endswith("%"):
        slots = parse_bytes(text, field=field, whole=catalogue.size)
    elif expert_bytes is None:
        raise InvalidConfig(field, text, "a number of experts or a share, as the size of an expert is not known")
    else:
        slots = parse_bytes(text, field=field) // expert_bytes
    least = int(catalogue.top_k.max())
    if not least <= slots <= catalogue.size:
        raise InvalidConfig(field, text, f"from {least} experts, which a row picks in a layer, to all {catalogue.size}")
    return slots


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one budget with so many sequences at once (None: as recorded).

    Without a link ``timed`` is None. ``cache`` counts whole hits: what was still on its way is a miss.
    """

    policy: str
    slots: int
    concurrent: int | None
    tokens: int
    cache: ReplayResult
    timed: TimedResult | None = None

    def record(self, experts: int, expert_bytes: int | None) -> dict[str, Any]:
        """Flat, for JSON."""
        missed = None if expert_bytes is None else self.cache.misses * expert_bytes
        record: dict[str, Any] = {
            "policy": self.policy,
            "slots": self.slots,
            "share": round(self.slots / experts, 6),
            "concurrent": self.concurrent,
            "tokens": self.tokens,
            **asdict(self.cache),
            "misses": self.cache.misses,
            "hit_rate": round(self.cache.hit_rate, 6),
            "bytes_missed": missed,
        }
        if self.timed is not None:
            own = asdict(self.timed)
            record |= {name: own[name] for name in own if name not in record}
        return record


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every policy under every budget (``slots``) at every concurrency (None: as recorded) on up to ``tokens`` rows.

    With ``timed`` the engine runs on simulated links, else hits are counted alone. ``belady``: the optimum beside them.
    """

    trace: RoutingTrace
    policies: tuple[PolicySpec, ...]
    slots: tuple[int, ...]
    concurrency: tuple[int | None, ...] = (1,)
    tokens: int | None = None
    timed: TimedReplay | None = None
    belady: bool = True

    def __post_init__(self) -> None:
        if None in self.concurrency and self.trace.step is None:
            raise TraceError("this trace does not say which rows ran together, so it can not be replayed as recorded")
        for spec in self.policies:
            spec.create(self.trace.catalogue(), lambda: iter(()))

    @property
    def work(self) -> int:
        """Rows to be replayed in all, as ``progress`` is told them."""
        rows = self.trace.tokens if self.tokens is None else min(self.tokens, self.trace.tokens)
        oracles = int(self.belady) + (len(self.slots) if self.belady and self.timed is not None else 0)
        return rows * len(self.concurrency) * (len(self.policies) * len(self.slots) + oracles)

    def steps(self, concurrent: int | None) -> Iterator[TraceStep]:
        if concurrent is None:
            return self.trace.recorded_steps(tokens=self.tokens)
        return self.trace.steps(concurrent=concurrent, tokens=self.tokens)

    def cells(self, progress: Progress = lambda rows: None) -> Iterator[Cell]:
        """One after the other; of each concurrency the optimum first. Raises BudgetTooSmall."""
        for concurrent in self.concurrency:
            if self.belady:
                yield from self._optimum(concurrent, progress)
            for spec in self.policies:
                for slots in self.slots:
                    yield self._cell(spec, slots, concurrent, progress)

    def _cell(self, spec: PolicySpec, slots: int, concurrent: int | None, progress: Progress) -> Cell:
        label = spec.label or spec.name
        if self.timed is not None:
            policy = spec.create(self.timed.catalogue(), lambda: self.steps(concurrent))
            result = self.timed.run(policy, self.steps(concurrent), slots, progress=progress)
            return Cell(label, slots, concurrent, result.tokens, result.cache, result)
        policy = spec.create(self.trace.catalogue(), lambda: self.steps(concurrent))
        rows = 0

        def count(number: int) -> None:
            nonlocal rows
            rows += number
            progress(number)

        counted = replay(policy, self.steps(concurrent), slots, tasks=self.trace.task, progress=count)
        return Cell(label, slots, concurrent, rows, counted)

    def _optimum(self, concurrent: int | None, progress: Progress) -> Iterator[Cell]:
        rows = sum(len(step.picks) for step in self.steps(concurrent))
        best = optimum(self.trace.catalogue(), self.steps(concurrent), self.slots)
        progress(rows)
        for slots in self.slots:
            timed = None
            if self.timed is not None:
                timed = self._cell(PolicySpec(BELADY), slots, concurrent, progress).timed
            yield Cell(BELADY, slots, concurrent, rows, best[slots], timed)
