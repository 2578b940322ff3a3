"""Replay: a policy against recorded routing, without a model.

Counts lookups, hits and evictions of one device arena with on-demand fetches alone. Transfers take no time; what a
policy wants ahead of need is not carried out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import BudgetTooSmall, GreenroomError, InvalidConfig
from greenroom.policies.arrays import Counts, Keys
from greenroom.policies.catalogue import Catalogue
from greenroom.policies.events import LayerRouting, Phase, Reason, Step, Tier, Transfer, VictimRequest
from greenroom.policies.expert_policy import ExpertPolicy


class TraceError(GreenroomError):
    """A routing trace that can not be read, or that contradicts itself."""


@dataclass(frozen=True, eq=False)
class RoutingTrace:
    """Recorded routing of decoded tokens.

    ``experts[tokens, layers, k]``: what the routers picked, indices within the layer. Sequence ``i`` is rows
    ``seq_starts[i]:seq_starts[i+1]``.
    """

    experts: NDArray[np.integer]
    seq_starts: Counts
    num_experts: int

    def __post_init__(self) -> None:
        starts = self.seq_starts
        if self.experts.dtype.kind not in "iu":
            raise TraceError(f"experts must be integers, not {self.experts.dtype}")
        if self.experts.ndim != 3 or 0 in self.experts.shape[1:]:
            raise TraceError(f"experts must be [tokens, layers, k], not of shape {self.experts.shape}")
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(self.experts) or (np.diff(starts) < 0).any():
            raise TraceError(f"seq_starts must rise from 0 to the number of tokens, {len(self.experts)}")
        if self.experts.size and not 0 <= int(self.experts.min()) <= int(self.experts.max()) < self.num_experts:
            raise TraceError(f"experts must lie from 0 to {self.num_experts - 1}")

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Reads an ``.npz`` with ``experts``, ``seq_starts`` and ``num_experts``. Raises TraceError."""
        try:
            with path.open("rb") as file, np.lib.npyio.NpzFile(file, allow_pickle=False) as arrays:
                experts, starts, width = arrays["experts"], arrays["seq_starts"], arrays["num_experts"].item()
        except (OSError, KeyError, ValueError, BadZipFile) as error:
            raise TraceError(f"{path} is no routing trace: {error}") from error
        return cls(experts, starts.astype(np.int64), int(width))

    def catalogue(self, *, expert_bytes: int = 1) -> Catalogue:
        """The experts of the traced model; a size of 1 makes every budget a number of slots."""
        _, layers, k = self.experts.shape
        return Catalogue.uniform("replay", layers=layers, experts=self.num_experts, top_k=k, expert_bytes=expert_bytes)

    def steps(self, *, concurrent: int = 1, tokens: int | None = None) -> Iterator[TraceStep]:
        """Steps of one row of each of ``concurrent`` running sequences, taken in file order.

        A sequence that ends is replaced by the next one at once. Ends when ``tokens`` rows are used (None: all),
        in the midst of sequences if need be; the last step is cut short where it would exceed them.
        """
        if concurrent < 1:
            raise InvalidConfig("concurrent", concurrent, "at least 1")
        left = len(self.experts) if tokens is None else tokens
        starts, ends = self.seq_starts[:-1].tolist(), self.seq_starts[1:].tolist()
        waiting = iter([entry for entry in zip(range(len(starts)), starts, ends, strict=True) if entry[1] < entry[2]])
        running: list[tuple[int, int, int]] = []
        while left > 0:
            running.extend(itertools.islice(waiting, concurrent - len(running)))
            if not running:
                return
            rows = running[:left]
            yield TraceStep(
                np.array([sequence for sequence, _, _ in rows], dtype=np.int64),
                self.experts[[row for _, row, _ in rows]],
            )
            left -= len(rows)
            running = [(sequence, row + 1, end) for sequence, row, end in running if row + 1 < end]


@dataclass(frozen=True, slots=True, eq=False)
class TraceStep:
    """One step of a replay: ``sequences[T]`` and their ``picks[T, layers, k]``."""

    sequences: NDArray[np.int64]
    picks: NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """A lookup is one distinct expert of one layer of one step; a hit one that was resident already."""

    lookups: int
    hits: int
    evictions: int

    @property
    def misses(self) -> int:
        return self.lookups - self.hits

    @property
    def hit_rate(self) -> float:
        """Share of lookups that hit; 0 where there were none."""
        return self.hits / self.lookups if self.lookups else 0.0


class ReplayCache:
    """The device arena of a replay: carries out what the policy decides and counts. Starts empty."""

    def __init__(self, policy: ExpertPolicy, budget_bytes: int) -> None:
        self.policy = policy
        self.catalogue = policy.catalogue
        self.resident = np.zeros(self.catalogue.size, dtype=np.bool_)
        self.free_bytes = budget_bytes
        self.lookups = 0
        self.hits = 0
        self.evictions = 0
        self._transfers = [
            Transfer(expert, Tier.DISK, Tier.DEVICE, Reason.ON_DEMAND)
            for expert in range(self.catalogue.size if "on_transfer_done" in policy.hooks else 0)
        ]
        policy.on_budget_changed(Tier.DEVICE, budget_bytes)

    @property
    def result(self) -> ReplayResult:
        """The counts so far."""
        return ReplayResult(self.lookups, self.hits, self.evictions)

    def route(self, routing: LayerRouting) -> None:
        """A layer's experts are used: those that miss are fetched, in the order of the event.

        None of them can be evicted meanwhile. Raises BudgetTooSmall where they do not fit all at once.
        """
        self.policy.on_layer_routed(routing)
        experts = routing.experts
        missing = experts[~self.resident[experts]]
        self.lookups += len(experts)
        self.hits += len(experts) - len(missing)
        if not len(missing):
            return
        incoming = self._bytes(missing)
        if incoming > self.free_bytes:
            self._make_room(incoming - self.free_bytes, experts, missing)
        self.resident[missing] = True
        self.free_bytes -= incoming
        if self._transfers:
            for expert in missing.tolist():
                self.policy.on_transfer_done(self._transfers[expert])

    def _make_room(self, bytes_needed: int, group: Keys, missing: Keys) -> None:
        evictable = self.resident.copy()
        evictable[group] = False
        request = VictimRequest(
            Tier.DEVICE, bytes_needed, evictable, self.resident, reason=Reason.ON_DEMAND, incoming=missing
        )
        victims = self.policy.victims(request)
        freed = self._bytes(victims)
        if freed < bytes_needed:
            raise BudgetTooSmall(f"a layer uses {len(group)} experts at once, which the budget does not hold")
        self.resident[victims] = False
        self.free_bytes += freed
        self.evictions += len(victims)
        self.policy.on_evicted(Tier.DEVICE, victims)

    def _bytes(self, experts: Keys) -> int:
        size = self.catalogue.record_bytes
        return size * len(experts) if size is not None else int(self.catalogue.bytes_of[experts].sum())


def replay(policy: ExpertPolicy, steps: Iterable[TraceStep], budget_bytes: int) -> ReplayResult:
    """Run every step's layers, ascending, through ``policy`` under a device budget.

    With one row in a step a layer's experts are used in the order recorded, with more in ascending order.
    """
    cache = ReplayCache(policy, budget_bytes)
    catalogue = policy.catalogue
    layers = range(catalogue.layers)
    firsts = catalogue.first[:-1, None]
    decode = np.full(0, Phase.DECODE, dtype=np.uint8)
    hooks = policy.hooks
    for number, traced in enumerate(steps):
        if len(decode) != len(traced.sequences):
            decode = np.full(len(traced.sequences), Phase.DECODE, dtype=np.uint8)
        step = Step(catalogue.pool, number, traced.sequences, decode)
        if "on_step_started" in hooks:
            policy.on_step_started(step)
        single = len(traced.sequences) == 1
        keys = traced.picks[0].astype(np.int64) + firsts if single else None
        ones = np.ones(traced.picks.shape[2], dtype=np.int64)
        for layer in layers:
            if "on_layer_entered" in hooks:
                policy.on_layer_entered(step, layer)
            picks = traced.picks[:, layer]
            if keys is not None:
                routing = LayerRouting(catalogue, step, layer, keys[layer], ones, picks)
            else:
                routing = LayerRouting.from_picks(catalogue, step, layer, picks)
            cache.route(routing)
            if "on_experts_done" in hooks:
                policy.on_experts_done(step, layer, routing.experts)
            if "on_layer_done" in hooks:
                policy.on_layer_done(step, layer)
    return cache.result
