"""Each slot's next expert comes as soon as the slot's has run (DuoServe-MoE §5.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from greenroom.experts.bookkeeping.ledger import State
from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.policies.base.events import Artifact, LayerRouting, Prediction, PredictionRequest, Step
from greenroom.policies.base.picks_predictor import PicksPredictor
from greenroom.policies.duoserve.literal import EXPERT_MLP, LiteralDuoServe
from tests.contract.experts.engines import EXPERTS, LAYERS, MANIFEST, TOP_K, run_layer
from tests.unit.experts.fakes import FakeStore

ROW = np.zeros(1, dtype=np.int64)


class Told(PicksPredictor):
    """Foresees these experts of each layer. ``late``: says so only when it is asked again."""

    kind = EXPERT_MLP

    def __init__(self, *layers: tuple[int, ...], late: bool = False) -> None:
        self._layers = layers
        self._late = late
        self._kept: Prediction | None = None

    def on_step_started(self, step: Step) -> None:
        self._kept = None

    def on_layer_routed(self, routing: LayerRouting) -> None:
        pass

    def answer(self, request: PredictionRequest) -> Prediction | None:
        values = np.full((1, EXPERTS), -9, dtype=np.float32)
        values[:, list(self._layers[request.layers[0]])] = 9
        found = Prediction(request, "1", values)
        if not self._late:
            return found
        self._kept = found
        return None

    def poll(self) -> Prediction | None:
        found, self._kept = self._kept, None
        return found


@contextmanager
def engine_of(*predictors: PicksPredictor, slots: int = TOP_K) -> Iterator[ExpertEngine]:
    catalogue = catalogue_of(MANIFEST)
    config = EngineConfig(device_slots=slots, transfer_timeout_s=20)
    engine = ExpertEngine(FakeStore(MANIFEST), catalogue, LiteralDuoServe(catalogue), config, predictors=predictors)
    try:
        yield engine
        engine.audit_idle()
    finally:
        engine.close()


def coming(engine: ExpertEngine, layer: int) -> set[int]:
    """Experts of the layer that are there or on their way."""
    states = engine.device.state[layer * EXPERTS : (layer + 1) * EXPERTS]
    return set(np.flatnonzero(states != State.ABSENT).tolist())


@pytest.mark.parametrize("late", [False, True])
def test_a_slot_is_given_on_when_its_expert_has_run(late: bool) -> None:
    with engine_of(Told((), (2, 3), (), late=late)) as engine, engine.step(ROW, ROW != 0):
        with engine.routed(0, np.array([[0, 1]])) as landing:
            arriving = iter(landing)
            next(arriving)
            assert coming(engine, 1) == set(), "both slots are needed"
            next(arriving)
            assert len(coming(engine, 1)) == 1, "the first has run, the second computes"
            assert next(arriving, None) is None
            engine.audit()
        assert coming(engine, 1) == {2, 3}
        assert coming(engine, 0) == set(), "nothing is kept"
        assert sorted(run_layer(engine, 1, np.array([[2, 3]]))) == [2, 3]
        assert engine.counters.on_demand_fetches == 2, "only the first layer's"


def test_it_is_given_on_too_where_all_of_a_layer_was_foreseen() -> None:
    with engine_of(Told((), (2, 3), (4, 5))) as engine, engine.step(ROW, ROW != 0):
        run_layer(engine, 0, np.array([[0, 1]]))
        while coming(engine, 1) - set(np.flatnonzero(engine.device.resident[EXPERTS : 2 * EXPERTS]).tolist()):
            engine._on_demand.wait_for([])
        with engine.routed(1, np.array([[2, 3]])) as landing:
            assert not isinstance(landing, list)
            next(landing)
            assert coming(engine, 2) == set()
            next(landing)
            assert len(coming(engine, 2)) == 1
            assert next(landing, None) is None


def test_what_was_wrongly_foreseen_is_fetched_again() -> None:
    with engine_of(Told((), (2, 3), (4, 5))) as engine:
        for _ in range(3):
            with engine.step(ROW, ROW != 0):
                assert sorted(run_layer(engine, 0, np.array([[0, 1]]))) == [0, 1]
                assert sorted(run_layer(engine, 1, np.array([[2, 4]]))) == [2, 4]
                assert sorted(run_layer(engine, 2, np.array([[4, 5]]))) == [4, 5]
        counters = engine.refresh_counters()
        assert counters.on_demand_fetches >= 3 * (2 + 1)
        assert counters.prefetches_used + counters.on_demand_fetches >= 3 * 2 * LAYERS


@pytest.mark.parametrize("slots", [TOP_K, 5, LAYERS * EXPERTS - 1])
def test_whatever_the_slots_nothing_is_kept(slots: int) -> None:
    """Of a layer that has run, nor of one step for the next."""
    with engine_of(Told((), (2, 3), (4, 5)), slots=slots) as engine:
        engine.preload(range(slots))
        for _ in range(2):
            with engine.step(ROW, ROW != 0):
                for layer, picks in enumerate(([0, 1], [2, 3], [4, 5])):
                    run_layer(engine, layer, np.array([picks]))
                    assert all(coming(engine, before) == set() for before in range(layer + 1))
            assert not engine.device.resident.any()
        assert engine.counters.on_demand_fetches >= 2, "the second step's first layer again"


def test_where_all_experts_are_resident_another_network_evicts_none() -> None:
    with engine_of(slots=LAYERS * EXPERTS) as engine:
        engine.preload(range(LAYERS * EXPERTS))
        engine.swapped(Artifact("another kind", "2", {}))
        assert engine.device.residents == LAYERS * EXPERTS


def test_a_prompt_passes_in_ascending_order_and_the_next_layers_first_follows() -> None:
    with engine_of() as engine, engine.step(ROW.repeat(3), np.ones(3, dtype=np.bool_)):
        picks = np.array([[5, 0], [3, 1], [4, 2]])
        for layer in range(LAYERS):
            assert run_layer(engine, layer, picks) == list(range(EXPERTS))
            assert coming(engine, layer) == set()
            if layer + 1 < LAYERS:
                assert coming(engine, layer + 1) == {0}
        assert engine.counters.on_demand_fetches + engine.counters.prefetches == LAYERS * EXPERTS
