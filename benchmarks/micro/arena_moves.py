"""How many bytes are moved within an arena to make room for experts of several sizes, over the bytes loaded.

    python -m benchmarks.arena_moves

Draws requests to the experts of a board (ResNet-18, and detectors of half and of equal size), by Zipf's law, into a
tenth of the memory under least recently used. Records lie whole, or cut at their tensors into pieces of at least so
many bytes. An expert in use may not be moved. Prints a table and, as its last line, one JSON object.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
import torch
from transformers import ResNetConfig, ResNetForImageClassification

from benchmarks.harness.reporting.progress import each
from greenroom.core.units import KIB, MIB
from greenroom.experts.bookkeeping.byte_arena import ByteArena
from greenroom.experts.pack.layout import PAGE_BYTES, align, cut

LEASTS = (None, 64 * KIB, 256 * KIB, MIB, 4 * MIB)
"""Of a piece; None: a record is one piece."""


def tensor_sizes(widths: Sequence[int]) -> list[int]:
    """Bytes of a ResNet's tensors in fp32, without making them."""
    config = ResNetConfig(hidden_sizes=list(widths), depths=[2, 2, 2, 2], layer_type="basic", embedding_size=widths[0])
    with torch.device("meta"):
        model = ResNetForImageClassification(config)
    return [tensor.nbytes for tensor in model.state_dict().values()]


def pieces_of(sizes: Sequence[int], least: int | None) -> list[int]:
    """Whole pages, since each piece is the target of a direct read."""
    if least is None:
        return [align(sum(sizes), PAGE_BYTES)]
    found, at = [], 0
    for count in cut(sizes, least):
        found.append(align(sum(sizes[at : at + count]), PAGE_BYTES))
        at += count
    return found


def run(records: Sequence[list[int]], uses: Sequence[int], budget: int, in_use: int) -> dict[str, Any]:
    """``uses``: of experts, one after the other. The last ``in_use`` of them may neither leave nor be moved."""
    arena, recent = ByteArena(budget), OrderedDict[int, None]()
    loads = loaded = moves = extra = 0
    seconds: list[float] = []
    for expert in uses:
        if expert in recent:
            recent.move_to_end(expert)
            continue
        pieces = records[expert]
        began = time.perf_counter()
        while True:
            idle = list(recent)[: len(recent) - in_use]
            made = arena.take(expert, pieces, set(idle))
            if made is not None:
                break
            extra += sum(pieces) <= arena.free
            victim = idle[0]
            del recent[victim]
            arena.give_back(victim)
        seconds.append(time.perf_counter() - began)
        recent[expert] = None
        loads, loaded, moves = loads + 1, loaded + sum(pieces), moves + len(made)
    return {
        "loads": loads,
        "loaded_bytes": loaded,
        "moved_share": arena.moved_bytes / loaded,
        "moves_a_load": moves / loads,
        "unusable": extra,  # what was free was enough, and of no use: one more had to leave
        "us_a_load": 1e6 * statistics.fmean(seconds),
    }


@click.command()
@click.option("--uses", type=click.IntRange(1), default=2000, show_default=True)
@click.option("--seeds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--in-use", type=click.IntRange(0), default=3, show_default=True, help="Experts that executors run.")
def main(uses: int, seeds: int, in_use: int) -> None:
    """Bytes moved over bytes loaded, by how records are cut."""
    full = tensor_sizes([64, 128, 256, 512])
    half = tensor_sizes([44, 90, 180, 362])
    other = tensor_sizes([60, 134, 250, 516])
    kinds = [full] * 352 + [half] * 12 + [other] * 12
    rows = []
    for least in each(LEASTS, "cuts"):
        made = {id(sizes): pieces_of(sizes, least) for sizes in (full, half, other)}
        records = [made[id(sizes)] for sizes in kinds]
        budget = align(sum(map(sum, records)) // 10, PAGE_BYTES)
        found = []
        for seed in range(seeds):
            random = np.random.default_rng(seed)
            order = random.permutation(len(kinds))
            chances = np.arange(1, len(kinds) + 1) ** -1.2
            found.append(
                run(records, order[random.choice(len(kinds), uses, p=chances / chances.sum())].tolist(), budget, in_use)
            )
        row: dict[str, Any] = {"least": least, "pieces": len(made[id(full)]), "budget": budget}
        for name in ("loads", "moved_share", "moves_a_load", "unusable", "us_a_load"):
            values = [one[name] for one in found]
            row[name] = {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}
        rows.append(row)
    click.echo(
        f"{'a piece, at least':<20}{'pieces':>8}{'loads':>8}{'of no use':>11}{'moves':>7}"
        f"{'moved / loaded':>24}{'us':>6}"
    )
    for row in rows:
        moved = row["moved_share"]
        text = "whole records" if row["least"] is None else f"{row['least'] // KIB} KiB"
        spread = f"{moved['mean']:.3f} ({moved['min']:.3f} to {moved['max']:.3f})"
        means = {name: row[name]["mean"] for name in ("loads", "unusable", "moves_a_load", "us_a_load")}
        click.echo(
            f"{text:<20}{row['pieces']:>8}{means['loads']:>8.0f}{means['unusable']:>11.0f}{means['moves_a_load']:>7.2f}"
            f"{spread:>24}{means['us_a_load']:>6.0f}"
        )
    click.echo("of no use: enough was free, and another expert had to leave; moves, us: a load")
    click.echo(json.dumps({"rows": rows, "uses": uses, "seeds": seeds}))


if __name__ == "__main__":
    main()
