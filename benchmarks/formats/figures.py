"""The figures that the rows come to. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.formats.arms import BF16, BF16_THIRD, OWN_THIRD
from benchmarks.formats.models import MODELS, FormatModel
from benchmarks.harness.children.greenroom_child import CONCURRENCY
from benchmarks.harness.reporting.aims import Aim
from benchmarks.harness.reporting.statistics import spread_json
from benchmarks.harness.rows import RESIDENT, Row, find, speed_ratio

STORED_BYTES = Aim(1.02, at_least=False)
OF_THE_CHECKPOINT, OF_BF16 = "stored_bytes_ratio", "bytes_ratio"


def aims(models: Mapping[str, FormatModel] = MODELS) -> dict[str, Aim]:
    found: dict[str, Aim] = {OF_THE_CHECKPOINT: STORED_BYTES}
    for name, model in models.items():
        own = {"third_gain": model.third_gain, "resident_gain": model.resident_gain, OF_BF16: model.bytes_ratio}
        found |= {f"{name}_{figure}": aim for figure, aim in own.items() if aim is not None}
    return found


def figures(rows: Sequence[Row], stored_bytes: Mapping[str, int]) -> dict[str, Any]:
    """``stored_bytes``: of an expert in the checkpoint, by format. A figure that was not measured is None.

    ``…_third_gain``, ``…_resident_gain``: one request at a time, tokens/s over those of bf16. ``stored_bytes_ratio``:
    the worst of the formats that keep what the checkpoint has.
    """
    by_format = {
        name: _of_format([row for row in rows if row.model == name], stored_bytes.get(name)) for name in MODELS
    }
    by_format = {name: found for name, found in by_format.items() if found}
    ratios = [
        found[OF_THE_CHECKPOINT]
        for name, found in by_format.items()
        if not MODELS[name].of_numbers and found[OF_THE_CHECKPOINT] is not None
    ]
    flat: dict[str, Any] = {OF_THE_CHECKPOINT: max(ratios, default=None)}
    for name, found in by_format.items():
        flat |= {f"{name}_{gain}": _median(found[gain]) for gain in ("third_gain", "resident_gain")}
        if MODELS[name].bytes_ratio is not None:
            flat[f"{name}_{OF_BF16}"] = found[OF_BF16]
    return {**flat, "by_format": by_format}


def row_json(row: Row) -> dict[str, Any]:
    return {
        "format": row.model,
        "experts": row.system,
        "memory": row.share,
        "concurrency": row.concurrency,
        "policy": row.policy,
        "rounds": len(row.turns),
        "tokens_per_s": spread_json(row.tokens_per_s, 3),
        "hit_rate": row.hit_rate,
        "bytes_moved": row.bytes_moved,
        "cgroup_limit_bytes": row.limit_bytes,
        "cgroup_peak_bytes": row.cgroup_peak_bytes,
        "peak_rss_bytes": row.peak_bytes,
        "facts": row.facts,
        "error": row.error,
    }


def expert_memory(row: Row) -> int:
    """Bytes for experts that its engine has."""
    return int(row.facts["experts_bytes"])


def _of_format(rows: Sequence[Row], stored_bytes: int | None) -> dict[str, Any]:
    if not rows:
        return {}
    found: dict[str, Any] = {}
    for suffix, concurrency in (("", 1), (f"_{CONCURRENCY}", CONCURRENCY)):
        own, bf16 = (
            {share: find(rows, system=system, share=share, concurrency=concurrency) for share in shares}
            for system, shares in ((rows[-1].model, (RESIDENT, BF16_THIRD, OWN_THIRD)), (BF16, (RESIDENT, BF16_THIRD)))
        )
        found |= {
            f"resident_gain{suffix}": spread_json(speed_ratio(own[RESIDENT], bf16[RESIDENT]), 3),
            f"third_gain{suffix}": spread_json(speed_ratio(own[BF16_THIRD], bf16[BF16_THIRD]), 3),
            f"own_third{suffix}": spread_json(speed_ratio(own[OWN_THIRD], own[RESIDENT]), 3),
        }
    own_row, bf16_row = (find(rows, system=system) for system in (rows[-1].model, BF16))
    record = None if own_row is None else int(own_row.facts["expert_bytes"])
    whole = None if bf16_row is None else int(bf16_row.facts["expert_bytes"])
    fits = find(rows, system=rows[-1].model, share=BF16_THIRD)
    return {
        **found,
        OF_THE_CHECKPOINT: round(record / stored_bytes, 4) if record and stored_bytes else None,
        OF_BF16: round(record / whole, 4) if record and whole else None,
        "all_fit_in_a_third": None if fits is None else fits.facts["slots"] == fits.facts["experts"],
    }


def _median(spread: Any) -> float | None:
    return None if spread is None else float(spread["median"])
