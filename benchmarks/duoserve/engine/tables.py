"""The stage's figures as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.harness.reporting.tables import median_range


def table(found: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for name in ("one", "many", "random_one", "random_many"):
        lines += [*_lines(found[name], _speed), ""]
    lines += [*_lines(found["prompts"], _prompts), ""]
    lines += _lines(found["ablation"], _ablation)
    return "\n".join(lines)


def _lines(own: Mapping[str, Any], lines: Callable[[Mapping[str, Any]], Iterator[str]]) -> list[str]:
    return [f"failed: {own['error']}"] if "error" in own else list(lines(own))


def _speed(own: Mapping[str, Any]) -> Iterator[str]:
    settings = own["settings"]
    yield (
        f"{settings['model']}, {settings['at_once']} at once: {settings['prompts']} prompts of {own['prompt_rows']:,} "
        f"tokens, {own['tokens']:,} generated, {own['rounds']} rounds, a third of the experts"
    )
    yield (
        f"{'':<20}{'tokens/s':>24}{'stall ms':>10}{'MiB':>8}{'hits':>7}{'demand':>8}{'ahead':>7}{'used':>6}"
        f"{'wasted':>8}{'link busy, prompts':>24}{'answers':>22}"
    )
    for name, row in own["rows"].items():
        wasted = "-" if row["wasted_share"] is None else f"{row['wasted_share']:.0%}"
        busy = [median_range(row["phases"][phase]["link_busy"]) for phase in ("prefill", "decode")]
        yield (
            f"{name:<20}{median_range(row['tokens_per_s'], 2):>24}{row['stall_ms_per_token']:>10.1f}"
            f"{row['mib_per_token']:>8.0f}{row['hit_rate']:>7.1%}{row['on_demand_per_token']:>8.2f}"
            f"{row['prefetches_per_token']:>7.2f}{row['used_per_token']:>6.2f}{wasted:>8}{busy[0]:>24}{busy[1]:>22}"
        )
    mean = own["ratio_mean"]
    yield (
        f"duoserve over the better of the others, by round {own['ratio_by_round']}; geometric mean {mean['mean']:.3f} "
        f"({mean['low']:.3f}–{mean['high']:.3f}); over "
        + ", ".join(f"{name} {median_range(spread)}" for name, spread in own["over"].items())
        + f"; without files over look-ahead {median_range(own['bare_over_look_ahead'])}"
        + f"; same answers: {'yes' if own['same_answers'] else 'no'}"
    )
    if own["maps_over_routers"]:
        each = ", ".join(f"{name} {median_range(spread)}" for name, spread in own["maps_over_routers"].items())
        yield f"maps of the residual stream over routers run ahead: {each}"


def _prompts(own: Mapping[str, Any]) -> Iterator[str]:
    yield f"a prompt's seconds, {own['prefills']} prompts of each length, {own['rounds']} rounds"
    yield f"{'rows':>6}  {'':<12}{'seconds':>24}{'resident':>24}{'bytes ÷ link':>24}{'over the larger':>24}"
    for cell in own["cells"]:
        cells = "".join(
            f"{median_range(cell[name], 3):>24}"
            for name in ("seconds", "resident_seconds", "link_seconds", "over_bound")
        )
        yield f"{cell['rows']:>6}  {cell['arm']:<12}{cells}"


def _ablation(own: Mapping[str, Any]) -> Iterator[str]:
    settings = own["settings"]
    yield (
        f"over the whole policy in the same round, {own['rounds']} rounds: a prompt of {settings['prompt_rows']} rows "
        f"(less is better), tokens/s one and {settings['at_once']} at once (more is better)"
    )
    yield f"{'':<32}{'prompt':>22}{'one':>22}{'many':>22}"
    for name, row in own["rows"].items():
        yield f"{name:<32}" + "".join(f"{median_range(row[part]):>22}" for part in ("prompt", "one", "many"))
    for name, why in own["failed"].items():
        yield f"{name}: {why}"
