"""Fetching ahead in the engine: what is asked, queued, taken back and refused; Belady's oracle on a recorded run."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from greenroom.experts.bookkeeping.ledger import State
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.policies.base.events import ROUTER, LayerRouting, Phase, Prediction, PredictionRequest, Reason, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.prefetching.look_ahead import LookAhead
from greenroom.policies.prefetching.next_layer import NextLayer
from greenroom.policies.registry import create_policy
from greenroom.policies.replacement.belady import Belady, Future
from greenroom.policies.replacement.lru import Lru
from greenroom.replay import TraceStep, replay
from tests.contract.experts.engines import EXPERTS, LAYERS, MANIFEST, Recorder, run_layer
from tests.unit.experts.fakes import FakeStore

ONE_ROW = np.zeros(1, dtype=np.int64)


class Gate:
    """Reads of some layers wait here until they are let through."""

    def __init__(self, *layers: int) -> None:
        self.open = threading.Event()
        self.waiting = threading.Event()
        self._layers = layers

    def __call__(self, layer: int, expert: int) -> None:
        if layer in self._layers and not self.open.is_set():
            self.waiting.set()
            assert self.open.wait(20)


def engine_of(policy: ExpertPolicy, slots: int, gate: Gate | None = None, queue_ahead: int = 4) -> ExpertEngine:
    config = EngineConfig(device_slots=slots, queue_ahead=queue_ahead, transfer_timeout_s=20)
    return ExpertEngine(FakeStore(MANIFEST, gate), policy.catalogue, policy, config)


def catalogue() -> Catalogue:
    return catalogue_of(MANIFEST)


def weights(*likely: int, layers: int = 1) -> NDArray[np.float32]:
    values = np.full((1, layers * EXPERTS), 0.01, dtype=np.float32)
    values[:, list(likely)] = 0.99
    return values


def answer(engine: ExpertEngine, *likely: int) -> None:
    request = engine.take_request(ROUTER)
    assert request is not None
    engine.predicted(Prediction(request, "", weights(*likely, layers=request.layers[1] - request.layers[0])))


def settle(engine: ExpertEngine) -> None:
    """Let everything that moves land."""
    while engine._tiers.moving:
        assert engine._tiers.wait(20)
        engine._on_demand.deliver()


def test_a_request_is_there_once_the_layers_own_fetches_are_queued_and_is_taken_once(
    closing: list[ExpertEngine],
) -> None:
    engine = engine_of(LookAhead(catalogue(), layers=2), 6, Gate())
    closing.append(engine)
    with engine.step(ONE_ROW, ONE_ROW == 1), engine.routed(0, np.array([[1, 4]])) as landing:
        assert engine.counters.on_demand_fetches == 2
        assert engine.take_request("another kind") is None
        request = engine.take_request(ROUTER)
        assert request is not None
        assert request.layers == (1, 3)
        assert engine.take_request(ROUTER) is None
        assert sorted(expert for expert, _ in landing) == [1, 4]


def test_what_is_foreseen_is_here_when_its_layer_comes(closing: list[ExpertEngine]) -> None:
    engine = engine_of(LookAhead(catalogue(), layers=1), 6)
    closing.append(engine)
    with engine.step(ONE_ROW, ONE_ROW == 1):
        engine.layer_entered(0)
        with engine.routed(0, np.array([[1, 4]])) as landing:
            answer(engine, 2, 5)
            assert sorted(expert for expert, _ in landing) == [1, 4]
        settle(engine)
        with engine.routed(1, np.array([[2, 5]])) as landing:
            assert [expert for expert, _ in landing] == [2, 5]
    counters = engine.counters
    assert (counters.prefetches, counters.prefetches_used, counters.hits) == (2, 2, 2)
    assert counters.on_demand_fetches == 2


def test_nothing_is_fetched_ahead_before_an_answer_that_comes_at_once(closing: list[ExpertEngine]) -> None:
    """What was wanted until now may be what the answer no longer wants."""
    policy = LookAhead(catalogue(), layers=2)
    engine = engine_of(policy, 12, Gate())
    closing.append(engine)
    engine.answers_at_once(ROUTER)
    assert policy.answered_at_once == {ROUTER}
    with engine.step(ONE_ROW, ONE_ROW == 1):
        for layer, picks, begun in ((0, [1, 4], 0), (1, [2, 5], 2)):
            with engine.routed(layer, np.array([picks])) as landing:
                policy.prefetch = Prefetch(7 + layer, (catalogue().layer_of == 2).astype(np.float32))
                engine._predictions.decided()
                assert engine.counters.prefetches == begun
                answer(engine, 2, 5)
                assert engine.counters.prefetches == begun + 2
                assert sorted(expert for expert, _ in landing) == picks
            settle(engine)


def test_what_waits_for_a_layer_is_taken_back_when_its_router_picks_others(closing: list[ExpertEngine]) -> None:
    gate = Gate(1)
    engine = engine_of(LookAhead(catalogue(), layers=1), 12, gate)
    closing.append(engine)
    with engine.step(ONE_ROW, ONE_ROW == 1):
        engine.layer_entered(0)
        with engine.routed(0, np.array([[0, 1]])) as landing:
            assert len(list(landing)) == 2
            answer(engine, 2, 3, 4)  # the first is being read, and held up; the others wait
            assert gate.waiting.wait(20)
        with engine.routed(1, np.array([[2, 5]])) as landing:
            first = EXPERTS
            assert engine.device.state[[first + 3, first + 4]].tolist() == [State.ABSENT] * 2
            assert engine.counters.prefetches == 1
            gate.open.set()
            assert sorted(expert for expert, _ in landing) == [2, 5]
    settle(engine)
    engine.audit(idle=True)
    assert engine.counters.prefetches_used == 1


def test_a_policy_is_not_asked_for_requests_where_everything_fits(closing: list[ExpertEngine]) -> None:
    engine = engine_of(LookAhead(catalogue()), LAYERS * EXPERTS)
    closing.append(engine)
    assert engine.asks == frozenset()
    engine_asking = engine_of(LookAhead(catalogue()), LAYERS * EXPERTS - 1)
    closing.append(engine_asking)
    assert engine_asking.asks == {ROUTER}


class Refusing(Lru):
    """Wants one expert, and evicts nothing for it while expert 0 is pinned."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.asked = 0

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        if self.prefetch is None:
            priority = np.zeros(self.catalogue.size, dtype=np.float32)
            priority[EXPERTS + 1] = 1
            self.prefetch = Prefetch(0, priority)

    def victims(self, request):  # type: ignore[no-untyped-def]
        if len(request.incoming) and request.incoming[0] == EXPERTS + 1:
            self.asked += 1
            if not request.evictable[0]:
                return np.empty(0, dtype=np.int64)
        return super().victims(request)


def test_a_refusal_holds_until_others_may_leave(closing: list[ExpertEngine]) -> None:
    policy = Refusing(catalogue())
    engine = engine_of(policy, 4)
    closing.append(engine)
    engine.preload([0, 1, 2, 3])
    with engine.step(ONE_ROW, ONE_ROW == 1):
        with engine.routed(0, np.array([[0, 1]])) as landing:
            assert policy.asked == 1
            engine.layer_entered(1)
            assert policy.asked == 1, "nothing has changed: not asked again"
            list(landing)
        assert policy.asked == 2
        assert engine.device.state[EXPERTS + 1] != State.ABSENT
        settle(engine)


def test_the_whole_next_layer_arrives_under_lfu_and_stays_until_it_has_run(closing: list[ExpertEngine]) -> None:
    engine = engine_of(NextLayer(catalogue(), retention="lfu"), EXPERTS + 3, queue_ahead=EXPERTS)
    closing.append(engine)
    with engine.step(ONE_ROW, ONE_ROW == 1):
        for turn in range(6):
            layer = turn % LAYERS
            run_layer(engine, layer, np.array([[turn % EXPERTS, (turn + 3) % EXPERTS]]))
            settle(engine)
            following = (layer + 1) % LAYERS
            span = engine.catalogue.spans[following]
            assert engine.device.resident[span].all(), f"after layer {layer}"
    assert engine.counters.on_demand_fetches == 2, "the very first layer's"


def forced_stream(engine: ExpertEngine, seed: int, rows: int) -> None:
    random = np.random.default_rng(seed)
    sequences = np.arange(rows)
    popularity = random.dirichlet(np.full(EXPERTS, 0.5), LAYERS)
    for _ in range(60):
        with engine.step(sequences, sequences < 0):
            for layer in range(LAYERS):
                picks = np.stack(
                    [
                        random.choice(EXPERTS, 2, replace=False, p=popularity[layer] * 0.9 + 0.1 / EXPERTS)
                        for _ in sequences
                    ]
                )
                run_layer(engine, layer, picks)


@pytest.mark.parametrize(("rows", "slots"), [(1, 5), (1, 9), (3, 9)])
def test_a_run_again_with_its_recorded_trace_misses_as_often_as_the_oracles_replay(
    closing: list[ExpertEngine], rows: int, slots: int
) -> None:
    first = engine_of(Lru(catalogue()), slots)
    closing.append(first)
    recorder = Recorder()
    first.listener = recorder
    forced_stream(first, 5, rows)
    future = Future.of_picks(catalogue(), recorder.picks)

    oracle = Belady(catalogue(), future=future)
    again = engine_of(oracle, slots)
    closing.append(again)
    forced_stream(again, 5, rows)

    steps = [
        TraceStep(sequences=np.arange(rows), picks=picks, phases=np.full(rows, Phase.DECODE, dtype=np.uint8))
        for picks in recorder.picks
    ]
    replayed = replay(Belady(catalogue(), future=future), steps, slots * catalogue().record_bytes)  # type: ignore[operator]
    misses = again.counters.lookups - again.counters.hits
    assert oracle.departures == 0
    assert misses == again.counters.on_demand_fetches == replayed.misses
    assert misses < first.counters.lookups - first.counters.hits

    ahead = engine_of(Belady(catalogue(), future=future, ahead=2), slots)
    closing.append(ahead)
    forced_stream(ahead, 5, rows)
    counters = ahead.counters
    assert counters.prefetches_used > 0
    assert counters.on_demand_fetches < misses


@pytest.mark.parametrize("name", ["next-layer", "top-k", "traced-top-k", "look-ahead"])
def test_prefetching_policies_do_prefetch(closing: list[ExpertEngine], name: str) -> None:
    """Guards the suite: its schedules reach what it is there to try."""
    engine = engine_of(create_policy(name, catalogue=catalogue(), options={"retention": "lru"}), 6)
    closing.append(engine)
    forced_stream(engine, 1, 1)
    assert engine.counters.prefetches_used > 0


class _Foresees(PicksPredictor):
    """Answers at once."""

    kind = "foreseen"

    def on_step_started(self, step: Step) -> None: ...

    def on_layer_routed(self, routing: LayerRouting) -> None: ...

    def answer(self, request: PredictionRequest) -> Prediction:
        return Prediction(request, "", np.zeros((1, 1), dtype=np.float32))


class _WantsByAnswers(Lru):
    """Wants all of layer 1 from the start, and nothing from layer 1's answer on."""

    asks = frozenset({"foreseen"})

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.predictors = (_Foresees(),)
        self.prefetch = Prefetch(0, (catalogue.layer_of == 1).astype(np.float32))

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        if routing.layer == 1:
            self._ask(PredictionRequest("foreseen", (2, 3), step=routing.step.number))

    def on_prediction(self, prediction: Prediction) -> None:
        self.prefetch = Prefetch(1, np.zeros(self.catalogue.size, dtype=np.float32))


@pytest.mark.parametrize("resident", [True, False])
def test_nothing_is_fetched_for_a_routed_layer_that_an_answer_no_longer_wants(
    resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy decides once a layer, when its predictor has answered; until then it says what it wanted before."""
    engine = engine_of(_WantsByAnswers(catalogue()), slots=12)
    try:
        engine.preload([0, EXPERTS, EXPERTS + 1][: 3 if resident else 2])
        begun: list[int] = []
        fetch = engine._tiers.fetch

        def seen(key: int, reason: Reason, priority: float = 0.0) -> None:
            begun.append(key)
            fetch(key, reason, priority)

        monkeypatch.setattr(engine._tiers, "fetch", seen)
        with engine.step(ONE_ROW, ONE_ROW == 1), engine.routed(1, np.array([[0, 1]])) as landing:
            assert sorted(expert for expert, _ in landing) == [0, 1]
        engine.audit_idle()
        assert begun == ([] if resident else [EXPERTS + 1])
    finally:
        engine.close()
