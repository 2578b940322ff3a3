"""A collaboration's profile as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from greenroom.core.coe_profile import CoeProfile, ExecutorsProfile
from greenroom.core.units import format_bytes
from greenroom.profiling.coe.batch_fit import furthest_off


def labels_of(profile: CoeProfile) -> dict[str, str]:
    """By architecture, what people can tell it by: its class, and an expert that has it."""
    first: dict[str, str] = {}
    many: dict[str, int] = {}
    for expert, key in profile.experts.items():
        first.setdefault(key, expert)
        many[key] = many.get(key, 0) + 1
    return {
        key: f"{one.model_class.removesuffix('Model')} ({first[key]}{f' +{many[key] - 1}' if many[key] > 1 else ''})"
        for key, one in profile.architectures.items()
        if key in first
    }


def describe_coe_profile(profile: CoeProfile) -> str:
    """K and B of each architecture, loading, memory, and the trials."""
    lines = [f"{profile.collaboration}: {len(profile.experts)} experts, measured on {profile.machine}"]
    for kind, own in profile.kinds.items():
        lines += ["", *_costs(profile, kind, own), "", *_trials(own), "", *_chosen(profile, own)]
    return "\n".join(lines)


def _costs(profile: CoeProfile, kind: str, own: ExecutorsProfile) -> Iterable[str]:
    count = own.executors
    beside = "" if count == 1 else "; alone in brackets"
    yield f"{kind}, a batch of n takes B + K · n with {_executors(own, count)}{beside}"
    rows = [("architecture", "K, ms", "B, ms", "line off", "batch", "load, ms", "weights", "intermediates")]
    for key, label in labels_of(profile).items():
        costs = own.architectures[key]
        times, alone = costs.by_executors[count], own.times(key, 1)
        rows.append(
            (
                label,
                f"{times.request_ms:.3g}{f' ({alone.request_ms:.3g})' if beside else ''}",
                f"{times.batch_ms:.3g}{f' ({alone.batch_ms:.3g})' if beside else ''}",
                f"{furthest_off(times):.0%}",
                f"{times.most}{' (largest)' if times.most == max(times.ms_by_batch) else ''}",
                f"{costs.load_ms:.3g}",
                format_bytes(profile.architectures[key].record_bytes),
                format_bytes(costs.bytes_by_batch.get(times.most, max(costs.bytes_by_batch.values()))),
            )
        )
    yield from _columns(rows)


def _trials(own: ExecutorsProfile) -> Iterable[str]:
    yield f"replayed with {format_bytes(own.memory_bytes)} and --scheduling {own.scheduling}"
    rows = [("executors", "threads each", "experts there", "requests/s", "window", "drawn in it", "requests/s")]
    for count, trial in sorted(own.trials.items()):
        low, high = trial.window
        rows.append(
            (
                f"{count}{' *' if count == own.executors else ''}",
                str(own.threads_by_executors.get(count, 1)),
                str(trial.residents),
                f"{trial.per_s:.4g}",
                f"{low}–{high}",
                str(trial.drawn),
                f"{trial.per_s_by_residents.get(trial.drawn, 0.0):.4g}",
            )
        )
    yield from _columns(rows)


def _chosen(profile: CoeProfile, own: ExecutorsProfile) -> Iterable[str]:
    trial = own.trials[own.executors]
    yield (
        f"chosen: {_executors(own, own.executors)}; {format_bytes(trial.expert_bytes)} for {trial.residents} of "
        f"{len(profile.experts)} experts ({own.expert_share:.0%}), the rest for intermediates"
    )
    if trial.served_per_s:
        points = (
            f"{residents} experts {served:.4g} ({trial.per_s_by_residents.get(residents, 0.0):.4g})"
            for residents, served in sorted(trial.served_per_s.items())
        )
        yield f"really served, requests/s (replayed): {', '.join(points)}"


def _executors(own: ExecutorsProfile, count: int) -> str:
    threads = own.threads_by_executors.get(count, 1)
    side = "" if count == 1 else " side by side"
    return f"{count} executor{'' if count == 1 else 's'}{side} of {threads} thread{'' if threads == 1 else 's'}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        first, *others = row
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        yield "  ".join(cells).rstrip()
