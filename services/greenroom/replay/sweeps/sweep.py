"""Policies × budgets × concurrency on one trace: which of them suit this routing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import parse_bytes
from greenroom.policies.base.events import Artifact
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.registry import EXPERT_POLICIES, GRAPH_POLICIES, create_policy, spelt
from greenroom.policies.replacement.belady import Belady, Future
from greenroom.replay.hit_rates import ReplayResult, optimum, replay
from greenroom.replay.sweeps.processes import in_processes
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.steps import TraceStep, groups
from greenroom.replay.traces.trace_file import TraceError

if TYPE_CHECKING:
    from greenroom.replay.simulation.timed_replay import TimedReplay, TimedResult

BELADY = "belady"


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """A policy by name, with its options. ``label``: as the user wrote it."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    label: str = ""

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """``decayed`` or ``decayed:decay=0.999,…``, values as in JSON. Raises InvalidConfig, naming the policy."""
        name, options = spelt("policy", text)
        return cls(name, options, text.strip())

    def create(self, catalogue: Catalogue, steps: Callable[[], Iterator[TraceStep]]) -> ExpertPolicy:
        """A new policy; Belady's oracle gets the future from ``steps``. Raises UnknownName, InvalidConfig."""
        if self.name != BELADY:
            return create_policy(self.name, catalogue=catalogue, options=self.options)
        future = Future.of_groups(groups(catalogue, steps()))
        policy = create_policy(BELADY, catalogue=catalogue, options={**self.options, "future": future})
        assert isinstance(policy, Belady)
        return policy


def specs_of(texts: Iterable[str], *, ahead: bool) -> tuple[PolicySpec, ...]:
    """The policies that ``texts`` name, each once. Raises InvalidConfig.

    ``all`` is every policy that shows something of its own: without ``ahead`` none that fetches ahead. Never Belady's
    oracle, nor policies that need forecasts, a profile or a graph.
    """
    specs = []
    for text in texts:
        if text.strip() == "all":
            named = (name for name, kind in EXPERT_POLICIES.items() if ahead or not kind.only_ahead)
            specs += [PolicySpec(name, label=name) for name in named if name not in _NOTHING_TO_SHOW]
        else:
            specs.append(PolicySpec.parse(text))
    return tuple(dict.fromkeys(specs))


_NOTHING_TO_SHOW = GRAPH_POLICIES | {BELADY, "popularity", "static"}
"""Left out of ``all``: the optimum stands beside it, and the others need forecasts, a profile or a graph of models."""

OPTIMUM = PolicySpec(BELADY, label=BELADY)
"""Without a link it is the bound of ``optimum``; with one it is the engine under Belady's policy."""

Place = tuple[int | None, PolicySpec, int]
"""At once, policy, slots."""


def slots_of(text: str, sizes: SlotSizes, *, sized: bool, field: str = "budget") -> int:
    """A budget as a number of experts: ``96``, a share such as ``25%``, or bytes such as ``2GiB``.

    ``sized``: whether ``sizes`` are those of the model. Raises InvalidConfig, naming ``field``: for bytes, too, where
    they are not.
    """
    if text.strip().isdigit():
        slots = int(text)
    elif text.strip().endswith("%"):
        slots = parse_bytes(text, field=field, whole=sizes.experts)
    elif not sized:
        raise InvalidConfig(field, text, "a number of experts or a share, as the size of an expert is not known")
    else:
        slots = parse_bytes(text, field=field)
        slots = sizes.within(slots) if slots <= sizes.all_bytes else sizes.experts + 1
    if not sizes.least <= slots <= sizes.experts:
        raise InvalidConfig(field, text, f"from {sizes.least} experts ({sizes.say_least()}) to all {sizes.experts}")
    return slots


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy under one budget with ``concurrent`` sequences at once (None: as recorded).

    Without a link ``timed`` is None. In ``cache`` an expert that was still on its way is a miss.
    """

    policy: str
    slots: int
    concurrent: int | None
    tokens: int
    cache: ReplayResult
    timed: TimedResult | None = None

    def record(self, experts: int, expert_bytes: int | None) -> dict[str, Any]:
        """All figures, flat, for JSON: those of steps with prompt rows as ``prefill_…``, of the others ``decode_…``.

        ``expert_bytes``: of one in the mean, which ``bytes_missed`` counts.
        """
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
            for phase in self.timed.phases:
                own |= {f"{phase}_{name}": value for name, value in own.pop(phase).items()}
            record |= {name: own[name] for name in own if name not in record}
        return record


@dataclass(frozen=True, slots=True)
class Sweep:
    """Every policy under every budget (``slots``) at every concurrency (None: as recorded) on up to ``tokens`` rows.

    With ``timed`` the engine runs on simulated links, else only hits are counted. ``belady``: add the optimum, in place
    of the policy of that name. ``artifacts``: given to every policy before it begins (an EAMC). ``expert_bytes``: as of
    ``RoutingTrace.catalogue``.
    """

    trace: RoutingTrace
    policies: tuple[PolicySpec, ...]
    slots: tuple[int, ...]
    concurrency: tuple[int | None, ...] = (1,)
    tokens: int | None = None
    timed: TimedReplay | None = None
    belady: bool = True
    artifacts: tuple[Artifact, ...] = ()
    expert_bytes: int | None = 1

    def __post_init__(self) -> None:
        if None in self.concurrency and self.trace.step is None:
            raise TraceError("this trace does not say which rows ran together, so it can not be replayed as recorded")
        for spec in self.policies:
            spec.create(self.catalogue, lambda: iter(()))

    @property
    def catalogue(self) -> Catalogue:
        return self.trace.catalogue(expert_bytes=self.expert_bytes)

    @property
    def rows(self) -> int:
        """Rows that each cell replays."""
        return self.trace.tokens if self.tokens is None else min(self.tokens, self.trace.tokens)

    @property
    def places(self) -> list[Place]:
        """The cells' places: for each concurrency the optimum first, then policy after policy."""
        specs = dict.fromkeys(((OPTIMUM,) if self.belady else ()) + self.policies)
        return [(concurrent, spec, slots) for concurrent in self.concurrency for spec in specs for slots in self.slots]

    def cells(self, *, jobs: int = 1, finished: Callable[[], object] = lambda: None) -> list[Cell]:
        """All cells, in the order of ``places``. With ``jobs`` above 1 they run in so many processes at a time.

        ``finished`` is called after each. Raises BudgetTooSmall; ProcessLost.
        """
        places = self.places
        jobs = min(jobs, len(places))
        if jobs > 1:
            return in_processes(self.cell, places, jobs, finished)
        cells = []
        for place in places:
            cells.append(self.cell(place))
            finished()
        return cells

    def cell(self, place: Place, go_on: Callable[[], object] = lambda: None) -> Cell:
        """The cell at ``place``. ``go_on`` is called after each step; what it raises ends the cell."""
        concurrent, spec, slots = place
        timed = None
        if self.timed is not None:
            policy = self._policy(self.timed.catalogue(), place, go_on)
            timed = self.timed.run(policy, self._steps(place, go_on), slots, artifacts=self.artifacts)
        if self.belady and spec == OPTIMUM:
            counted = optimum(self.catalogue, self._steps(place, go_on), slots)
        elif timed is not None:
            counted = timed.cache
        else:
            catalogue = self.catalogue
            policy = self._policy(catalogue, place, go_on)
            for artifact in self.artifacts:
                policy.on_artifact_swapped(artifact)
            budget = SlotSizes(catalogue).nbytes(slots)
            counted = replay(policy, self._steps(place, go_on), budget, tasks=self.trace.task)
        return Cell(spec.label, slots, concurrent, self.rows, counted, timed)

    def _policy(self, catalogue: Catalogue, place: Place, go_on: Callable[[], object]) -> ExpertPolicy:
        return place[1].create(catalogue, lambda: self._steps(place, go_on))

    def _steps(self, place: Place, go_on: Callable[[], object]) -> Iterator[TraceStep]:
        concurrent = place[0]
        if concurrent is None:
            steps = self.trace.recorded_steps(tokens=self.tokens)
        else:
            steps = self.trace.steps(concurrent=concurrent, tokens=self.tokens)
        for step in steps:
            yield step
            go_on()
