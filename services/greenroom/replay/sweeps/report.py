"""A sweep's cells as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from greenroom.core.units import MIB
from greenroom.policies.base.events import ROUTER
from greenroom.policies.registry import EXPERT_POLICIES
from greenroom.replay.sweeps.sweep import Cell, PolicySpec, Sweep

if TYPE_CHECKING:
    from greenroom.replay.simulation.timed_replay import PhaseResult


def tables(sweep: Sweep, cells: Sequence[Cell], expert_bytes: int | None) -> str:
    """One table a measure: a row for each policy, a column for each budget, a block for each concurrency.

    ``expert_bytes``: of one expert in the mean.
    """
    wanted = [_table("hit rate, %", sweep, cells, lambda cell: f"{100 * cell.cache.hit_rate:.1f}")]
    if expert_bytes is not None and sweep.timed is None:
        wanted.append(
            _table(
                "bytes missed, MiB a token",
                sweep,
                cells,
                lambda cell: _number(cell.cache.misses * expert_bytes / MIB / max(1, cell.tokens)),
            )
        )
    if sweep.timed is not None:
        wanted += [
            _table("predicted tokens/s", sweep, cells, lambda cell: _each(cell, lambda t: t.tokens / (t.seconds or 1))),
            _table(
                "stall, ms a token", sweep, cells, lambda cell: _each(cell, lambda t: 1e3 * t.stall_seconds / t.tokens)
            ),
            _table(
                "bytes moved, MiB a token",
                sweep,
                cells,
                lambda cell: _each(cell, lambda t: t.bytes_moved / MIB / t.tokens),
            ),
        ]
        if any(cell.timed is not None and cell.timed.prefill.steps for cell in cells):
            wanted += _by_phase(sweep, cells)
    return "\n\n".join(wanted)


def _by_phase(sweep: Sweep, cells: Sequence[Cell]) -> list[str]:
    """Tables whose cells say two figures: of the steps with prompt rows, and of the others."""
    measures: dict[str, Callable[[PhaseResult], str]] = {
        "hit rate, %": lambda part: f"{100 * part.hits / (part.lookups or 1):.1f}",
        "stall, ms a row": lambda part: _number(1e3 * part.stall_seconds / part.rows),
        "bytes moved, MiB a row": lambda part: _number(part.bytes_moved / MIB / part.rows),
    }

    def show(cell: Cell, measure: Callable[[PhaseResult], str]) -> str:
        parts = () if cell.timed is None else cell.timed.phases.values()
        return " / ".join(measure(part) if part.rows else "-" for part in parts)

    return [
        _table(f"{title}: prompts / answers", sweep, cells, partial(show, measure=measure))
        for title, measure in measures.items()
    ] + ["prompts: steps with prompt rows, which rows of answers may share; answers: all other steps"]


def heading(name: str, sweep: Sweep, sizes: str | None) -> str:
    """What was replayed, on what. ``sizes``: of the experts."""
    trace = sweep.trace
    rows = trace.tokens if sweep.tokens is None else min(sweep.tokens, trace.tokens)
    widths, top_k = trace.experts_per_layer, trace.catalogue().top_k
    size = "" if sizes is None else f" of {sizes}"
    lines = [
        f"{name}: {rows:,} of {trace.tokens:,} tokens; {trace.layers} layers × {_range(widths)} experts{size}, "
        f"top-{_range(top_k)}; one cache for all layers, empty at the start"
    ]
    lines.append(f"columns: experts in memory, of {trace.catalogue().size}")
    if sweep.belady:
        lines[-1] += "; belady knows what is to come: "
        lines[-1] += "no policy hits more" if sweep.timed is None else "none hits more that fetches on demand alone"
    if sweep.timed is not None:
        timed = sweep.timed
        compute = timed.compute
        lines.append(
            f"link {timed.disk.describe()}, reads of {timed.reads.describe()}; compute {1e3 * compute.layer_s:.3g} ms "
            f"a layer and {1e3 * compute.expert_s:.3g} ms an expert; predictions "
            + ("not answered" if timed.recall is None else f"from the trace, recall {timed.recall:.0%}")
        )
    ahead = [spec for spec in sweep.policies if EXPERT_POLICIES[spec.name].only_ahead]
    if ahead and sweep.timed is None:
        lines.append(f"without --link nothing is fetched ahead: {_names(ahead)} shown as they are on demand alone")
    asking = [spec for spec in ahead if EXPERT_POLICIES[spec.name].asks == {ROUTER}]
    if asking and sweep.timed is not None and sweep.timed.recall is None:
        lines.append(f"without --recall nothing is predicted: {_names(asking)} shown as they are on demand alone")
    return "\n".join(lines)


def as_json(name: str, sweep: Sweep, cells: Sequence[Cell], expert_bytes: int | None) -> dict[str, Any]:
    """All figures, flat enough for a data frame: ``cells`` is a list of records."""
    trace, timed = sweep.trace, sweep.timed
    catalogue = trace.catalogue()
    return {
        "trace": name,
        "model": trace.model,
        "layers": trace.layers,
        "experts": catalogue.size,
        "top_k": catalogue.top_k.tolist(),
        "expert_bytes": expert_bytes,
        "timed": None
        if timed is None
        else {
            "link_bytes_per_s": timed.disk.bytes_per_s,
            "link_latency_s": timed.disk.latency_s,
            "reads": timed.reads.describe(),
            "layer_s": timed.compute.layer_s,
            "expert_s": timed.compute.expert_s,
            "row_s": timed.compute.row_s,
            "step_s": timed.compute.step_s,
            "host_slots": timed.host_slots,
            "recall": timed.recall,
        },
        "cells": [cell.record(catalogue.size, expert_bytes) for cell in cells],
    }


def _names(specs: Sequence[PolicySpec]) -> str:
    return ", ".join(spec.label or spec.name for spec in specs)


def at_once(concurrent: int | None) -> str:
    if concurrent is None:
        return "as recorded"
    return "one sequence at a time" if concurrent == 1 else f"{concurrent} sequences at once"


def _table(title: str, sweep: Sweep, cells: Sequence[Cell], show: Callable[[Cell], str]) -> str:
    experts = sweep.trace.catalogue().size
    by_place = {(cell.concurrent, cell.policy, cell.slots): cell for cell in cells}
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    first = max(len(title), *(len(at_once(c)) for c in sweep.concurrency), *(len(policy) + 2 for policy in policies))
    heads = [f"{slots} ({100 * slots / experts:.3g}%)" for slots in sweep.slots]
    shown = {place: show(cell) for place, cell in by_place.items()}
    width = max(10, *(len(text) + 2 for text in (*heads, *shown.values())))
    lines = [f"{title:<{first}}" + "".join(f"{head:>{width}}" for head in heads)]
    for concurrent in sweep.concurrency:
        lines.append(at_once(concurrent))
        for policy in policies:
            row = "".join(f"{shown.get((concurrent, policy, slots), ''):>{width}}" for slots in sweep.slots)
            lines.append(f"  {policy:<{first - 2}}{row}")
    return "\n".join(lines)


def _each(cell: Cell, measure: Callable[[Any], float]) -> str:
    return "" if cell.timed is None or not cell.timed.tokens else _number(measure(cell.timed))


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _range(values: Any) -> str:
    low, high = int(min(values)), int(max(values))
    return str(low) if low == high else f"{low}-{high}"
