"""Timed replay: the times of known links, worked out by hand, and the counts of the engine on real threads."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.experts.engine import EngineConfig, ExpertEngine
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.policies.base.artifacts import artifact_of
from greenroom.policies.base.events import ROUTER, LayerRouting, Phase, Prediction, PredictionRequest
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Prefetch
from greenroom.policies.registry import EXPERT_POLICIES, create_policy
from greenroom.policies.replacement.lru import Lru
from greenroom.replay import RoutingTrace, TraceStep
from greenroom.replay.hit_rates import replay
from greenroom.replay.simulation.simulated_hardware import LinkProfile, parse_seconds
from greenroom.replay.simulation.simulated_predictions import TracePredictions
from greenroom.replay.simulation.timed_replay import (
    ComputeProfile,
    PhaseResult,
    SimulatedStore,
    TimedEngine,
    TimedReplay,
    TimedResult,
)
from tests.contract.prepared_policies import mlp_file, prepared_predictors
from tests.matrices import matrix
from tests.unit.replay.traces import trace_of

PAGE = 4096
SECOND_AN_EXPERT = LinkProfile(bytes_per_s=PAGE)
NO_COMPUTE = ComputeProfile()


def one_pick_each(*experts: int, layers: int = 1, width: int = 4) -> RoutingTrace:
    """One sequence; a row uses one expert in each layer, as listed."""
    picks = np.array(experts, dtype=np.uint8).reshape(-1, layers, 1)
    return RoutingTrace(picks, np.array([0, len(picks)]), width)


def timed(trace: RoutingTrace, **settings: object) -> TimedReplay:
    defaults: dict[str, object] = {"expert_bytes": PAGE, "disk": SECOND_AN_EXPERT, "compute": NO_COMPUTE}
    return TimedReplay(trace, **(defaults | settings))  # type: ignore[arg-type]


def run(setup: TimedReplay, slots: int, policy: type[Lru] = Lru, **options: object) -> TimedResult:
    return setup.run(policy(setup.catalogue()), setup.trace.steps(), slots, **options)  # type: ignore[arg-type]


def test_each_miss_waits_for_its_bytes_and_a_hit_for_nothing() -> None:
    trace = one_pick_each(0, 1, 0, 2, 1)  # with two slots: miss miss hit miss(1 out) miss(0 out)

    result = run(timed(trace, compute=ComputeProfile(layer_s=0.25, expert_s=0.5, step_s=0.125)), 2)

    assert (result.hits, result.lookups, result.evictions) == (1, 5, 2)
    assert result.stall_seconds == pytest.approx(4.0)
    assert result.compute_seconds == pytest.approx(5 * (0.25 + 0.5 + 0.125))
    assert result.seconds == pytest.approx(result.stall_seconds + result.compute_seconds)
    assert result.bytes_moved == 4 * PAGE


def test_what_is_here_is_computed_while_the_others_come() -> None:
    picks = np.array([[[0, 1]], [[0, 2]]], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 2]), 4)

    result = run(timed(trace, compute=ComputeProfile(expert_s=0.75)), 3)

    # First step: 0 after 1 s, computed until 1.75; 1 after 2 s, computed until 2.75. Second: 0 is computed until
    # 3.5 while 2 comes until 3.75, and computed until 4.5.
    assert result.seconds == pytest.approx(4.5)
    assert result.stall_seconds == pytest.approx(1 + 0.25 + 0.25)


def test_more_rows_take_longer() -> None:
    trace = RoutingTrace(np.zeros((3, 1, 1), dtype=np.uint8), np.array([0, 1, 2, 3]), 4)
    setup = timed(trace, compute=ComputeProfile(expert_s=0.5, row_s=0.125))

    result = setup.run(Lru(setup.catalogue()), trace.steps(concurrent=3), 1)

    assert result.compute_seconds == pytest.approx(0.5 + 3 * 0.125)
    assert (result.tokens, result.lookups) == (3, 1)


def test_latency_counts_where_the_link_was_idle() -> None:
    picks = np.array([[[0, 1, 2]]], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 1]), 4)

    result = run(timed(trace, disk=LinkProfile(PAGE, latency_s=0.5)), 3)

    assert result.seconds == pytest.approx(0.5 + 3)


@pytest.mark.parametrize(
    "reads", [ReadSettings(), ReadSettings(threads=2, depth=2), ReadSettings(read_bytes=PAGE, threads=4, depth=2)]
)
def test_however_it_is_read_a_link_moves_no_more_than_it_can(reads: ReadSettings) -> None:
    trace = trace_of(20, layers=2, k=2, experts=8)
    setup = timed(trace, reads=reads, expert_bytes=4 * PAGE, disk=LinkProfile(4 * PAGE))

    result = setup.run(Lru(setup.catalogue()), trace.steps(), 4)

    assert result.bytes_moved == 4 * PAGE * (result.lookups - result.hits)
    assert result.seconds == pytest.approx(result.bytes_moved / (4 * PAGE))


class NextLayer(Lru):
    """Wants expert 0 of the next layer."""

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        priority = np.zeros(self.catalogue.size, dtype=np.float32)
        if routing.layer + 1 < self.catalogue.layers:
            priority[self.catalogue.key(routing.layer + 1, 0)] = 1
        self.prefetch = Prefetch(routing.step.number * self.catalogue.layers + routing.layer, priority)


@pytest.mark.parametrize(("compute", "stall"), [(0.25, 1.75), (1.0, 1.0), (5.0, 1.0)])
def test_a_prefetch_hides_behind_computation(compute: float, stall: float) -> None:
    trace = one_pick_each(0, 0, layers=2)

    result = run(timed(trace, compute=ComputeProfile(expert_s=compute)), 4, NextLayer)

    assert result.stall_seconds == pytest.approx(stall)
    assert (result.prefetches, result.prefetches_used, result.on_demand_fetches) == (1, 1, 1)
    assert result.hits == (1 if compute >= 1 else 0)


def test_a_prefetch_that_is_wrong_makes_the_right_one_wait() -> None:
    trace = one_pick_each(0, 1, layers=2)

    result = run(timed(trace, compute=ComputeProfile(expert_s=0.25)), 4, NextLayer)

    # The wrong one begins at 1 s and is not taken back; the right one is asked for at 1.25 s and begins at 2 s.
    assert result.stall_seconds == pytest.approx(1 + 1.75)
    assert result.bytes_moved == 3 * PAGE


def test_layers_whose_experts_differ_in_size_take_their_own_time_and_slots() -> None:
    picks = np.array([[0, 0], [1, 1], [2, 0], [0, 1]], dtype=np.uint8).reshape(-1, 2, 1)
    trace = RoutingTrace(picks, np.array([0, 4]), 4, expert_bytes=np.array([PAGE, 3 * PAGE]))
    setup = timed(trace, expert_bytes=None, upload=LinkProfile(PAGE), host_slots=4)

    result = run(replace(setup, host_slots=0), 4)

    # Two slots of each: the first layer misses four times (LRU), the second twice.
    assert (result.hits, result.evictions) == (2, 2)
    assert result.bytes_moved == (4 * 1 + 2 * 3) * PAGE
    assert result.seconds == pytest.approx(4 * 1 + 2 * 3)
    # Both links in turn; the host, whose copies of what the device holds leave first, still has the last miss.
    assert run(setup, 4).seconds == pytest.approx(4 * 2 + 2 * 6 - 1)


def test_a_host_tier_costs_two_hops_once_and_one_after() -> None:
    trace = one_pick_each(0, 1, 0, 1)
    setup = timed(trace, upload=LinkProfile(4 * PAGE), host_slots=2)

    result = run(setup, 1)

    assert result.seconds == pytest.approx(2 * (1 + 0.25) + 2 * 0.25)
    assert result.bytes_moved == 2 * PAGE, "from the disk"
    with pytest.raises(InvalidConfig, match="host tier"):
        run(timed(trace, host_slots=2), 1)


def test_the_resident_at_the_start_cost_nothing() -> None:
    trace = one_pick_each(3, 2, 3)

    result = run(timed(trace), 2, resident=[2, 3])

    assert (result.hits, result.seconds, result.bytes_moved) == (3, 0.0, 0)


def test_one_run_after_the_other_goes_on_with_what_is_resident() -> None:
    first, second = one_pick_each(0, 1), one_pick_each(1, 2)
    setup = timed(first)

    with TimedEngine(setup, Lru(setup.catalogue()), 2) as engine:
        cold = engine.run(first.steps())
        engine.change_disk(LinkProfile(2 * PAGE))
        engine.compute = ComputeProfile(expert_s=0.25)
        warm = engine.run(second.steps())

    assert (cold.hits, cold.bytes_moved) == (0, 2 * PAGE)
    assert cold.seconds == pytest.approx(2.0)
    assert (warm.hits, warm.bytes_moved) == (1, PAGE)
    assert warm.stall_seconds == pytest.approx(0.5)
    assert warm.compute_seconds == pytest.approx(2 * 0.25)


def test_time_passes_between_two_steps_and_never_back() -> None:
    trace = one_pick_each(0, 1)
    setup = timed(trace)

    with TimedEngine(setup, Lru(setup.catalogue()), 2) as engine:
        first, second = trace.steps()
        engine.step(first)
        assert engine.now() == pytest.approx(1.0)
        engine.rest_until(5.0)
        engine.rest_until(3.0)
        assert engine.now() == pytest.approx(5.0)
        engine.step(second)
        assert engine.now() == pytest.approx(6.0)
        assert engine.experts.counters.stall_seconds == pytest.approx(2.0)


def test_prompts_and_answers_are_told_apart() -> None:
    picks = np.array([[[0]], [[1]], [[0]], [[2]]], dtype=np.uint8)
    phase = np.array([Phase.PREFILL, Phase.PREFILL, Phase.DECODE, Phase.DECODE], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 4]), 4, phase=phase)

    result = run(timed(trace, compute=ComputeProfile(expert_s=0.25, step_s=0.5)), 2)

    # The prompt's step: 0.5 s, then both experts come, one computed meanwhile. Then a hit, and a miss.
    assert result.prefill == PhaseResult(1, 2, 2.75, 2.0 - 0.25, 2, 0, 2, 2 * PAGE, 2 * PAGE)
    assert result.decode == PhaseResult(2, 2, 2.5, 1.0, 2, 1, 1, PAGE, PAGE)
    assert result.phases == {"prefill": result.prefill, "decode": result.decode}


@matrix(1, host_slots=(0, 12), name=sorted(EXPERT_POLICIES))
def test_prompts_and_answers_are_the_whole(name: str, host_slots: int) -> None:
    trace = trace_of(20, 40, 30, layers=3, k=2, experts=8)
    phase = np.where(np.arange(90) % 10 < 4, Phase.PREFILL, Phase.DECODE).astype(np.uint8)
    trace = RoutingTrace(trace.experts, trace.seq_starts, trace.num_experts, phase=phase)
    compute = ComputeProfile(layer_s=0.3, expert_s=0.7)
    setup = timed(trace, compute=compute, upload=LinkProfile(4 * PAGE), host_slots=host_slots, recall=0.8)

    result = setup.run(create_policy(name, catalogue=setup.catalogue()), trace.steps(concurrent=3), 9)

    prefill, decode = result.prefill, result.decode
    assert min(prefill.steps, decode.steps, prefill.lookups, decode.lookups, prefill.bytes_moved) > 0
    assert prefill.rows + decode.rows == result.tokens
    assert prefill.seconds + decode.seconds == pytest.approx(result.seconds)
    assert prefill.stall_seconds + decode.stall_seconds == pytest.approx(result.stall_seconds)
    for measure in ("lookups", "hits", "on_demand_fetches", "bytes_moved"):
        assert getattr(prefill, measure) + getattr(decode, measure) == getattr(result, measure)
    for part in (prefill, decode):
        assert 0 <= part.bytes_on_demand <= part.bytes_moved


def test_networks_answer_on_recorded_routing_too() -> None:
    """Four picks a layer come on demand in the first, and in the others where the network was wrong."""
    trace = trace_of(20, 20, layers=3, k=2, experts=6)
    setup = timed(trace, compute=ComputeProfile(layer_s=2.0, expert_s=1.0), predictors=prepared_predictors)
    without = timed(trace, compute=setup.compute)
    policies = [create_policy("duoserve", catalogue=setup.catalogue(), options={"literal": True}) for _ in range(3)]
    other = artifact_of(setup.catalogue(), mlp_file([6] * 3, 2, seed=5), "another")

    found = setup.run(policies[0], trace.steps(), 2)
    swapped = setup.run(policies[1], trace.steps(), 2, artifacts=[other])
    on_demand = without.run(policies[2], trace.steps(), 2)

    assert (on_demand.prefetches, on_demand.on_demand_fetches, on_demand.hits) == (0, 40 * 3 * 2, 0)
    assert found.prefetches == swapped.prefetches == 40 * 2 * 2, "each layer but the first is foreseen"
    assert 0 < found.prefetches_used < found.prefetches
    assert found.on_demand_fetches == 40 * 3 * 2 - found.prefetches_used
    assert found.prefetches_used != swapped.prefetches_used
    assert found.bytes_moved == (found.on_demand_fetches + found.prefetches) * PAGE
    assert found.seconds < on_demand.seconds, "what is wrong came while nothing else could be moved"
    with pytest.raises(InvalidConfig, match=r"expert_mlp: 'version 1: .*top-3"):
        setup.run(policies[0], (), 2, artifacts=[artifact_of(setup.catalogue(), mlp_file([6] * 3, 3), "wrong")])


def test_of_a_second_run_only_that_is_told() -> None:
    trace = one_pick_each(0, 1, 0)
    setup = timed(trace)

    with TimedEngine(setup, Lru(setup.catalogue()), 2) as engine:
        engine.run(trace.steps())
        again = engine.run(trace.steps())

    assert again.decode == PhaseResult(3, 3, 0.0, 0.0, 3, 3, 0, 0, 0)
    assert again.prefill == PhaseResult(0, 0, 0.0, 0.0, 0, 0, 0, 0, 0)


def test_a_budget_below_the_top_k_is_refused() -> None:
    with pytest.raises(BudgetTooSmall):
        run(timed(trace_of(3, k=3)), 2)


@matrix(1, concurrent=(1, 3), name=sorted(EXPERT_POLICIES))
def test_without_prefetches_hits_are_those_of_the_replay_that_takes_no_time(name: str, concurrent: int) -> None:
    trace = trace_of(30, 30, 30, layers=3, k=2, experts=8)
    setup = timed(trace, compute=ComputeProfile(expert_s=0.3), queue_ahead=0)

    slow = setup.run(create_policy(name, catalogue=setup.catalogue()), trace.steps(concurrent=concurrent), 9)
    steps = ascending(trace, concurrent)
    quick = replay(create_policy(name, catalogue=trace.catalogue()), steps, 9)

    assert slow.cache == quick
    assert 0 < quick.hits < quick.lookups


def ascending(trace: RoutingTrace, concurrent: int) -> list[TraceStep]:
    """The engine takes a layer's experts in ascending order, a replay of one row in the order recorded."""
    ordered = RoutingTrace(np.sort(trace.experts, axis=2), trace.seq_starts, trace.num_experts)
    return list(ordered.steps(concurrent=concurrent))


class InstantStore(SimulatedStore):
    """For real movers: what lands are zeros."""

    def read_part(self, layer: int, expert: int, start: int, buffer: memoryview) -> None:
        buffer[:1] = b"\0"


@pytest.mark.parametrize("name", ["lru", "lfu", "lfu-reset", "fifo", "decayed"])
@pytest.mark.parametrize("slots", [4, 9, 20])
def test_counts_are_those_of_the_engine_on_real_threads(name: str, slots: int) -> None:
    trace = trace_of(25, 25, layers=3, k=2, experts=8)
    setup = timed(trace, compute=ComputeProfile(layer_s=0.1, expert_s=0.2))
    steps = list(trace.steps(concurrent=2))
    predicted = setup.run(create_policy(name, catalogue=setup.catalogue()), steps, slots, resident=[1, 12])

    engine = ExpertEngine(
        InstantStore(trace, PAGE),
        setup.catalogue(),
        create_policy(name, catalogue=setup.catalogue()),
        EngineConfig(device_slots=slots, transfer_timeout_s=20),
    )
    try:
        engine.preload([1, 12])
        read = engine.refresh_counters().bytes_by_link["disk"]
        for step in steps:
            with engine.step(step.sequences, step.phases == Phase.PREFILL):
                for layer in range(trace.layers):
                    engine.layer_entered(layer)
                    with engine.routed(layer, step.picks[:, layer].astype(np.int64)) as landing:
                        for _ in landing:
                            pass
        counters = engine.refresh_counters()
    finally:
        engine.close()

    assert (predicted.lookups, predicted.hits, predicted.evictions) == (
        counters.lookups,
        counters.hits,
        counters.evictions,
    )
    assert predicted.bytes_moved == counters.bytes_by_link["disk"] - read


class Asking(Lru):
    """Asks for the next layer's picks and prefetches what is probable."""

    asks = frozenset({ROUTER})

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        if routing.layer + 1 < self.catalogue.layers:
            self._ask(PredictionRequest(ROUTER, (routing.layer + 1, routing.layer + 2), routing.step.number))

    def on_prediction(self, prediction: Prediction) -> None:
        layer = prediction.request.layers[0]
        priority = np.zeros(self.catalogue.size, dtype=np.float32)
        values = prediction.values.max(axis=0)
        priority[self.catalogue.span(layer)] = np.where(values > 0.5, values, 0)
        self.prefetch = Prefetch(0 if self.prefetch is None else self.prefetch.generation + 1, priority)


def test_predictions_from_the_trace_are_as_good_as_their_recall() -> None:
    trace = trace_of(60, layers=4, k=2, experts=8)
    compute = ComputeProfile(layer_s=0.5, expert_s=1.5)
    by_recall = {
        recall: run(timed(trace, compute=compute, recall=recall), 12, Asking) for recall in (None, 0.0, 0.5, 1.0)
    }

    assert by_recall[None].prefetches == 0
    assert by_recall[1.0].stall_seconds < by_recall[0.5].stall_seconds < by_recall[None].stall_seconds
    assert by_recall[0.0].prefetches_used < by_recall[0.5].prefetches_used < by_recall[1.0].prefetches_used
    assert by_recall[0.0].bytes_moved > by_recall[1.0].bytes_moved


@pytest.mark.parametrize("recall", [0.0, 0.4, 1.0])
def test_a_prediction_names_as_many_as_are_picked(recall: float) -> None:
    catalogue = Catalogue.uniform("pool", layers=3, experts=8, top_k=2)
    picks = trace_of(400, layers=3, k=2, experts=8).experts
    request = PredictionRequest(ROUTER, (1, 3), 0)

    values = TracePredictions(catalogue, recall).answer(request, picks).values

    assert values.shape == (400, 16)
    assert ((values >= 0) & (values <= 1)).all()
    named = (values > 0.5).reshape(400, 2, 8)
    assert (named.sum(axis=2) == 2).all()
    found = np.take_along_axis(named, picks[:, 1:].astype(np.int64), axis=2)
    assert found.mean() == pytest.approx(recall, abs=0.05)


def test_what_is_no_recall_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="recall"):
        TracePredictions(Catalogue.uniform("pool", layers=1, experts=2, top_k=1), 1.5)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("1GiB/s", 2**30, 0),
        ("1.5GiB/s,0.2ms", 1.5 * 2**30, 2e-4),
        ("500 MB/s, 30us", 5e8, 3e-5),
        ("2MiB/s,1s", 2**21, 1),
    ],
)
def test_links_are_written_as_people_do(text: str, rate: float, latency: float) -> None:
    link = LinkProfile.parse(text)

    assert link.bytes_per_s == pytest.approx(rate)
    assert link.latency_s == pytest.approx(latency)


@pytest.mark.parametrize("text", ["", "1GiB", "fast", "1GiB/s,2", "1GiB/s,-1ms", "1Gibbon/s", "0GiB/s"])
def test_what_is_no_link_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig):
        LinkProfile.parse(text)


def test_what_is_no_time_is_refused() -> None:
    assert parse_seconds("0.3ms", field="compute") == pytest.approx(3e-4)
    with pytest.raises(InvalidConfig, match="compute"):
        parse_seconds("3", field="compute")
    with pytest.raises(InvalidConfig, match="expert_s"):
        ComputeProfile(expert_s=-1)


def test_each_layer_says_how_long_it_was_blocked_for_each_of_its_experts() -> None:
    picks = np.array([[[0, 1, 2]], [[0, 1, 3]]], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 2]), 4)
    setup = timed(trace, compute=ComputeProfile(expert_s=0.25))
    waits: list[list[float]] = []

    result = setup.run(Lru(setup.catalogue()), trace.steps(), 4, waits=waits)

    # 0, 1 and 2 land after 1, 2 and 3 s, computed in between; then only 3 is missing, while 0 and 1 are computed.
    first, second = waits
    assert first == pytest.approx([1.0, 0.75, 0.75])
    assert second == pytest.approx([0.0, 0.0, 0.5])
    assert sum(first + second) == pytest.approx(result.stall_seconds)


class Phases(Lru):
    """Notes what each routed layer's step is."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self.heard: list[tuple[int, Phase | None]] = []

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        self.heard.append((routing.layer, routing.step.phase))


def test_a_layer_that_no_row_picks_in_does_not_run() -> None:
    none = 255
    picks = np.array([[[0], [none]], [[1], [none]], [[none], [0]]], dtype=np.uint8)  # two encoded rows, one decoded
    phase = np.array([Phase.ENCODE, Phase.ENCODE, Phase.DECODE], dtype=np.uint8)
    trace = RoutingTrace(picks, np.array([0, 3]), 4, phase=phase)
    setup = timed(trace, compute=ComputeProfile(layer_s=0.5))
    policy = Phases(setup.catalogue())

    result = setup.run(policy, trace.steps(), 4)

    assert policy.heard == [(0, Phase.ENCODE), (1, Phase.DECODE)]
    assert result.compute_seconds == pytest.approx(2 * 0.5)
