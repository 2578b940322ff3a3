"""The tables of what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.harness.reporting.aims import Aim, figure_lines
from benchmarks.peers.results import GREENROOM, SAME_TOTAL, THIRD, Row, spread
from greenroom.core.units import format_bytes

AIMS = {
    "resident_ratio_llama": Aim(1.0, at_least=True),
    "third_ratio_llama": Aim(1.5, at_least=True),
    "third_ratio_llama_8": Aim(1.3, at_least=True),
    "gguf_resident_ratio_llama": Aim(0.9, at_least=True),
    "gguf_third_ratio_llama": Aim(1.5, at_least=True),
    "gguf_third_ratio_llama_8": Aim(1.3, at_least=True),
    "third_ratio_streaming": Aim(1.2, at_least=True),
}


def print_table(rows: Sequence[Row]) -> None:
    """One line an arm and situation; beside a peer's what greenroom makes of it."""
    head = ("memory", "at once", "engine", "tok/s", "(min-max)", "ratio", "(rounds)", "prompt", "MiB/tok", "peak RSS",
            "in cgroup of")  # fmt: skip
    line = "{:<25}{:>8} {:<13}{:>9}{:>17}{:>7}{:>13}{:>9}{:>9}{:>11}{:>20}"
    by_key = {(row.model, row.engine, row.memory, row.sequences): row for row in rows}
    for model in dict.fromkeys(row.model for row in rows):
        print(f"\n{model}")
        print(line.format(*head))
        for row in (row for row in rows if row.model == model):
            print(line.format(*_cells(row, by_key)))
            for error in dict.fromkeys(row.errors):
                print(f"{'':<34}failed: {error}")


def _cells(row: Row, by_key: dict[tuple[str, str, str, int], Row]) -> tuple[Any, ...]:
    told = row.as_json()
    if not row.samples:
        return (row.memory, row.sequences, row.engine, "-", "", "", "", "", "", "", "")
    between = f"({told['tokens_per_s_min']}-{told['tokens_per_s_max']})"
    ours = by_key.get((row.model, GREENROOM, THIRD if row.memory == SAME_TOTAL else row.memory, row.sequences))
    ratio, rounds = "", ""
    if row.engine != GREENROOM and ours is not None and ours.tokens_per_s and row.tokens_per_s:
        ratio = f"{ours.tokens_per_s / row.tokens_per_s:.2f}"
        if (ends := spread(ours, row)) is not None:
            rounds = f"({ends[0]:.2f}-{ends[1]:.2f})"
    limit = ""
    if "cgroup_limit" in told:
        limit = format_bytes(told["cgroup_limit"])
        if "cgroup_peak" in told:
            limit = f"{limit} ({told['cgroup_peak'] / told['cgroup_limit']:.0%})"
    return (
        row.memory, row.sequences, row.engine, told["tokens_per_s"], between, ratio, rounds,
        f"{told['prompt_s']:.2f} s", told["mib_read_per_token"], format_bytes(told["peak_rss_bytes"]), limit,
    )  # fmt: skip


def print_memory(rows: Sequence[Row]) -> None:
    """What the arms take in all at a third, and how much of it is the runtime and not the model."""
    print(
        "\nmemory at a third, beside the same bytes for experts: the runtime's own, which a larger model does not have"
    )
    for row in rows:
        if row.memory == THIRD and row.own_bytes is not None and row.expert_budget is not None and row.samples:
            total = max(sample.peak_rss for sample in row.samples)
            print(
                f"  {row.model}, {row.sequences} at once, {row.engine:<13} experts {format_bytes(row.expert_budget)}, "
                f"runtime {format_bytes(row.own_bytes)}, peak resident set {format_bytes(total)}"
            )


def print_aims(found: dict[str, float | None]) -> None:
    """The figures that have an aim, and whether they reach it."""
    print("\ngreenroom's tokens/s over llama.cpp's, the worst of the models")
    print("(gguf: of the files that both read; streaming: over BigMoeOnEdge's on them)")
    print("\n".join(f"  {line}" for line in figure_lines(found, AIMS)))
