"""Rows and ratios from what the rounds measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

RESIDENT, THIRD, SAME_TOTAL = "resident", "third", "third, greenroom's total"
GREENROOM, LLAMA, STREAMING = "greenroom", "llama.cpp", "BigMoeOnEdge"


@dataclass(frozen=True)
class Sample:
    """One run of an arm. Bytes; ``cgroup_*`` None outside of one."""

    round: int
    tokens_per_s: float
    prompt_s: float
    load_s: float
    peak_rss: int
    read_bytes_per_token: float
    base_rss: int | None = None
    cgroup_limit: int | None = None
    cgroup_peak: int | None = None
    hit_rate: float | None = None


@dataclass
class Row:
    """An arm in one situation, over all rounds. ``own_bytes``: what it takes beside the model, as announced or seen."""

    model: str
    engine: str
    memory: str
    sequences: int
    settings: str
    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    expert_budget: int | None = None
    own_bytes: int | None = None

    @property
    def tokens_per_s(self) -> float | None:
        return statistics.median(sample.tokens_per_s for sample in self.samples) if self.samples else None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            key: value for key, value in asdict(self).items() if key not in ("samples", "errors") and value is not None
        }
        if self.samples:
            rates = [sample.tokens_per_s for sample in self.samples]
            found |= {
                "tokens_per_s": round(statistics.median(rates), 2),
                "tokens_per_s_min": round(min(rates), 2),
                "tokens_per_s_max": round(max(rates), 2),
                "prompt_s": round(self._median("prompt_s"), 3),
                "load_s": round(self._median("load_s"), 2),
                "mib_read_per_token": round(self._median("read_bytes_per_token") / 2**20, 2),
                "peak_rss_bytes": max(sample.peak_rss for sample in self.samples),
            }
            for name in ("base_rss", "cgroup_limit", "cgroup_peak", "hit_rate"):
                values = [value for sample in self.samples if (value := getattr(sample, name)) is not None]
                if values:
                    found[name] = max(values)
        if self.errors:
            found["errors"] = self.errors
        return found

    def _median(self, name: str) -> float:
        return float(statistics.median(getattr(sample, name) for sample in self.samples))


def ratio(
    rows: Sequence[Row], memory: str, sequences: int, *, models: Sequence[str], peer_memory: str | None = None,
    peer: str = LLAMA,
) -> float | None:  # fmt: skip
    """greenroom's tokens/s over a peer's, the worst of the models; None where one of them has no figure.

    ``peer_memory``: the peer's situation, where it is not the same.
    """
    rates = {(row.model, row.engine, row.memory): row.tokens_per_s for row in rows if row.sequences == sequences}
    found = []
    for model in models:
        ours = rates.get((model, GREENROOM, memory))
        theirs = rates.get((model, peer, peer_memory or memory))
        if ours is None or theirs is None:
            return None
        found.append(ours / theirs)
    return min(found) if found else None


def spread(ours: Row, theirs: Row) -> tuple[float, float] | None:
    """The least and the largest ratio of two runs of the same round, which stood side by side."""
    peer = {sample.round: sample.tokens_per_s for sample in theirs.samples}
    ratios = [one.tokens_per_s / peer[one.round] for one in ours.samples if one.round in peer]
    return (min(ratios), max(ratios)) if ratios else None


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of positions at which both would have picked the same token, behind the same tokens."""
    pairs = [pair for mine, other in zip(ours, theirs, strict=True) for pair in zip(mine, other, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def summary(rows: Sequence[Row], models: Sequence[str]) -> dict[str, float | None]:
    """The keys that the aims name, the same at eight sequences, and against a peer with as much memory in all."""
    wanted: dict[str, tuple[str, int, str | None]] = {
        "resident_ratio_llama": (RESIDENT, 1, None),
        "resident_ratio_llama_8": (RESIDENT, 8, None),
        "third_ratio_llama": (THIRD, 1, None),
        "third_ratio_llama_8": (THIRD, 8, None),
        "third_ratio_llama_same_total": (THIRD, 1, SAME_TOTAL),
        "third_ratio_llama_same_total_8": (THIRD, 8, SAME_TOTAL),
    }
    found = {
        key: ratio(rows, memory, sequences, models=models, peer_memory=peer)
        for key, (memory, sequences, peer) in wanted.items()
    }
    return {key: None if value is None else round(value, 3) for key, value in found.items()}


def streaming_summary(rows: Sequence[Row], models: Sequence[str]) -> dict[str, float | None]:
    """The aim against BigMoeOnEdge, which has one sequence."""
    value = ratio(rows, THIRD, 1, models=models, peer=STREAMING)
    return {"third_ratio_streaming": None if value is None else round(value, 3)}
