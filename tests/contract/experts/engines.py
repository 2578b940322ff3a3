"""Engines on a store in memory, the policies that they are tested under, and one layer as the model runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.experts.engine import EngineConfig, ExpertEngine, catalogue_of
from greenroom.experts.pack.direct_io import ReadSettings
from greenroom.policies.base.array_types import Keys, Mask
from greenroom.policies.base.events import LayerRouting, Prediction, Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch, Target
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.replacement.lru import Lru
from greenroom.policies.replacement.next_use import NextUse
from tests.contract.prepared_policies import EVERY_POLICY, prepared_policy, prepared_predictors
from tests.unit.experts.fakes import FakeStore, manifest

LAYERS, EXPERTS, TOP_K = 3, 6, 2
SIZE = LAYERS * EXPERTS
MANIFEST = manifest(LAYERS, EXPERTS, TOP_K)


class RestlessPrefetch(Lru):
    """Wants other experts after every layer, some at the cost of others, and a target on top: all queues are used."""

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._random = np.random.default_rng(7)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        shape = self.catalogue.size
        priority = (self._random.random(shape) * (self._random.random(shape) < 0.4)).astype(np.float32)
        self.prefetch = Prefetch(generation, priority, may_evict=self._random.random(shape) < 0.5)
        if generation % 3 == 0:
            self.target = Target(generation, self._random.random(shape) < 0.3, drop_others=generation % 2 == 0)


class RestlessOnTwoTiers(RestlessPrefetch):
    """As restless, each want for the device or the host as it comes, and now and then none."""

    def on_layer_routed(self, routing: LayerRouting) -> None:
        super().on_layer_routed(routing)
        prefetch, target = self.prefetch, self.target
        assert prefetch is not None
        self.prefetch = replace(prefetch, tier=self._tier())
        if target is not None and target.generation == prefetch.generation:
            self.target = None if self._random.random() < 0.2 else replace(target, tier=self._tier())

    def _tier(self) -> Tier:
        return Tier.HOST if self._random.random() < 0.5 else Tier.DEVICE


class BackwardOrder(Lru):
    """Computes a layer's experts in descending order, whatever is resident."""

    def compute_order(self, routing: LayerRouting, resident: Mask) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return routing.experts[::-1].copy()


class Streaming(NextUse):
    """Passes what a layer misses through a few slots."""

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        return True


class RestlessStreaming(RestlessOnTwoTiers):
    """As restless on two tiers, every other layer passing what it misses through a few slots."""

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        return routing.layer % 2 == 0


class BackwardStreaming(BackwardOrder):
    """In descending order, through a few slots."""

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        return True


POLICIES: dict[str, Callable[[Catalogue], ExpertPolicy]] = {
    **{name: partial(prepared_policy, name) for name in EVERY_POLICY},
    "restless": RestlessPrefetch,
    "restless-host": RestlessOnTwoTiers,
    "backward": BackwardOrder,
    "streaming": Streaming,
    "restless-streaming": RestlessStreaming,
    "backward-streaming": BackwardStreaming,
}


def make_engine(
    policy: str,
    device_slots: int,
    host_slots: int,
    before_read: Callable[[int, int], None] | None = None,
    *,
    pages: Sequence[int] = (),
) -> tuple[ExpertEngine, FakeStore]:
    """``pages``: of the records of each layer. With several sizes the slots are at least those that it needs."""
    made_of = manifest(LAYERS, EXPERTS, TOP_K, pages)
    catalogue = catalogue_of(made_of)
    sizes = SlotSizes(catalogue)
    if pages:
        device_slots = max(device_slots, sizes.least)
        host_slots = host_slots and max(host_slots, sizes.classes)
    store = FakeStore(made_of, before_read)
    config = EngineConfig(device_slots=device_slots, host_slots=host_slots, transfer_timeout_s=20)
    made = POLICIES[policy](catalogue)
    engine = ExpertEngine(store, catalogue, made, config, predictors=prepared_predictors(made))
    engine.answers_at_once("router")  # as ``run_layer`` does
    return engine, store


def run_layer(engine: ExpertEngine, layer: int, picks: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> list[int]:
    """One layer as the model's hooks run it; what the policy asks of the router is answered at random."""
    engine.layer_entered(layer)
    seen = []
    with engine.routed(layer, picks) as landing:
        if "router" in engine.asks and (request := engine.take_request("router")) is not None:
            engine.predicted(Prediction(request, "", guesses(len(picks), request.layers, engine.counters.lookups)))
            engine.audit()
        for expert, (weights,) in landing:
            engine.audit()
            assert (weights == 100 * layer + expert).all()
            seen.append(expert)
    return seen


def guesses(rows: int, layers: tuple[int, int], seed: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Mostly unlikely, so that some are worth an eviction and some are not."""
    count = (layers[1] - layers[0]) * EXPERTS
    return np.random.default_rng(seed).random((rows, count), dtype=np.float32) ** 2


def run_steps(engine: ExpertEngine, steps: list[list[list[int]]]) -> None:
    """``steps[s][layer]`` are the experts that one row each, in pairs, is routed to."""
    for layers in steps:
        rows = np.zeros(max(map(len, layers)), dtype=np.int64)
        with engine.step(rows, rows == 0):
            for layer, experts in enumerate(layers):
                picks = np.array([[e, (e + 1) % EXPERTS] for e in experts], dtype=np.int64)
                seen = run_layer(engine, layer, picks)
                assert sorted(seen) == np.unique(picks).tolist()
                engine.audit(idle=True)
    counters = engine.refresh_counters()
    assert counters.steps == len(steps)
    assert counters.hits + counters.on_demand_fetches <= counters.lookups
    assert counters.prefetches_used + counters.prefetches_wasted <= counters.prefetches
    assert counters.host_prefetches_used + counters.host_prefetches_wasted <= counters.host_prefetches


routes = st.lists(
    st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=5), min_size=LAYERS, max_size=LAYERS),
    min_size=1,
    max_size=6,
)


sizes_of_records = st.one_of(st.just([1] * LAYERS), st.lists(st.integers(1, 3), min_size=LAYERS, max_size=LAYERS))
"""In pages, by layer: all alike, or any."""


class Recorder:
    """Listens to an engine: the picks of each step ``[T, layers, k]``."""

    def __init__(self) -> None:
        self.steps: list[list[NDArray[np.integer]]] = []

    def sequence_queued(self, sequence: object) -> None:
        pass

    def sequence_preempted(self, sequence: int) -> None:
        pass

    def layer_routed(self, step: object, layer: int, picks: NDArray[np.integer]) -> None:
        if layer == 0:
            self.steps.append([])
        self.steps[-1].append(picks.copy())

    def step_ended(self, step: object, *, failed: bool) -> None:
        assert not failed

    def sequence_reported(self, sequence: int, report: object) -> None:
        pass

    @property
    def picks(self) -> list[NDArray[np.integer]]:
        return [np.stack(layers, axis=1) for layers in self.steps]


READS = {
    "whole": ReadSettings(),
    "parts": ReadSettings(read_bytes=4096, threads=3, depth=2),
    "deep": ReadSettings(threads=2, depth=3),
}
