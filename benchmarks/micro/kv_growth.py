"""Chats without max_tokens in little KV memory: how many run at once, and what running out costs.

    python -m benchmarks.kv_growth [--kv-memory 3MiB] [--chats 24] [--rounds N]

The bundled model, three ways: reserving (each chat is expected to fill the context, so it holds all that from its
start), growing (by the mean answers of the model's profile), and unknown (growing without a profile). Then, in fp32,
three times as many chats as fit: texts beside each chat's own alone, rows that ran twice, tokens/s of both ways in
turns. The same where no answer is what was expected of it: each is 150 tokens long, and one was expected. Then what
growing costs a row of a larger model, and what pages behind a table would cost a prompt's chunk. One JSON object on the
last line.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.harness.machine import cache_folder, describe_machine
from greenroom import LLM, SamplingParams
from greenroom.demo import bundled_profile_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.policies.base.answer_lengths import AnswerLengths

SAMPLING = SamplingParams(temperature=0)
AT_ONCE = 256
MODEL = KVLayout((LayerKV(4, 128, 4, 128),) * 48, torch.bfloat16, torch.device("cpu"))
"""As Qwen3-30B-A3B has it: 96 KiB a token."""
BLOCK, CHUNK, CONTEXTS = 16, 256, (1024, 4096)


class Expected(AnswerLengths):
    """So many tokens of every answer, whatever is seen."""

    def __init__(self, tokens: float) -> None:
        super().__init__()
        self._tokens = tokens

    def held_mean(self, task: str) -> float | None:
        return self._tokens


WAYS = {"reserving": Expected(1e9), "growing": None}
LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """One run of chats that came at once."""

    texts: list[tuple[int, ...]]
    most_running: int
    seconds: float
    preemptions: int
    recomputed_rows: int
    rows: int

    def figures(self, alone: Sequence[tuple[int, ...]]) -> dict[str, float]:
        """``alone``: the texts of each chat by itself."""
        return {
            "most_running": self.most_running,
            "texts_changed": sum(text != own for text, own in zip(self.texts, alone, strict=True)),
            "preemptions": self.preemptions,
            "rows_twice": self.recomputed_rows / (self.rows - self.recomputed_rows),
            "tokens_per_s": self.tokens_per_s,
        }

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.texts)) / self.seconds


def chats(count: int, seed: int) -> list[list[dict[str, str]]]:
    """Of all tasks in turns."""
    each = [list(samples(task, -(-count // len(TASKS)), seed=seed)) for task in TASKS]
    prompts = [one.prompt for several in zip(*each, strict=True) for one in several]
    return [[{"role": "user", "content": prompt}] for prompt in prompts[:count]]


@contextmanager
def model(cache: Path, *, expects: AnswerLengths | None, profile: bool, **options: Any) -> Iterator[LLM]:
    """The bundled model with all its experts."""
    options = {"tokens_per_step": 512, "max_running": AT_ONCE, **options}
    path = bundled_profile_path() if profile else None
    with LLM(cache_dir=cache, warm_start=False, progress=False, profile=path, max_waiting=512, **options) as llm:
        if expects is not None:
            llm.worker.loop.engine.needs.lengths = expects
        yield llm


def run(llm: LLM, asked: Sequence[list[dict[str, str]]], sampling: SamplingParams = SAMPLING) -> Run:
    """All at once."""
    loop, most = llm.worker.loop, 0

    def pause() -> None:
        nonlocal most
        most = max(most, len(loop.engine.running))

    loop.between_steps = pause
    before = loop.stats()
    begin = time.perf_counter()
    answers = llm.chat(asked, sampling)
    seconds = time.perf_counter() - begin
    after = loop.stats()
    return Run(
        [answer.token_ids for answer in answers],
        most,
        seconds,
        after.preemptions - before.preemptions,
        after.recomputed_rows - before.recomputed_rows,
        after.rows - before.rows,
    )


def at_once(cache: Path, kv_memory: str, count: int) -> dict[str, int]:
    """How many of so many chats run at once, in bf16 as the model is served."""
    found = {}
    for way, expects, profile in (
        ("reserving", WAYS["reserving"], True),
        ("growing", None, True),
        ("unknown", None, False),
    ):
        with model(cache, expects=expects, profile=profile, kv_memory=kv_memory) as llm:
            found[way] = run(llm, chats(count, seed=5)).most_running
    return found


def overload(cache: Path, kv_memory: str, fits: int, rounds: int) -> dict[str, Any]:
    """Three times as many chats as fit, in fp32."""
    asked = chats(3 * fits, seed=6)
    with model(cache, expects=None, profile=True, dtype="float32", max_running=1) as llm:
        alone = run(llm, asked).texts
    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, expects in WAYS.items():
            with model(cache, expects=expects, profile=True, dtype="float32", kv_memory=kv_memory) as llm:
                run(llm, asked[:4])
                runs[way].append(run(llm, asked))
    figures = {}
    for way, of in runs.items():
        told = [one.figures(alone) for one in of]
        figures[way] = {name: max(one[name] for one in told) for name in told[0]}
        figures[way]["tokens_per_s"] = statistics.median(one["tokens_per_s"] for one in told)
    pairs = zip(runs["growing"], runs["reserving"], strict=True)
    return {
        "chats": len(asked),
        "ways": figures,
        "tokens_per_s_over_reserving": statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
    }


def unforeseen(cache: Path, kv_memory: str, count: int) -> dict[str, float]:
    """Answers of 150 tokens where one was expected, in fp32."""
    asked = chats(count, seed=8)
    with model(cache, expects=None, profile=False, dtype="float32") as llm:
        alone = run(llm, asked, LONG).texts
    with model(cache, expects=Expected(1), profile=False, dtype="float32", kv_memory=kv_memory) as llm:
        return run(llm, asked, LONG).figures(alone)


def growing_costs(rows: int, turns: int = 3) -> dict[str, float]:
    """Microseconds a row, of the fastest turn: growing and writing into fresh memory, the same into memory that an
    earlier sequence touched, and writing there without growing."""
    written = [torch.ones(1, 4, rows, 128, dtype=torch.bfloat16)] * 2
    found: dict[str, list[float]] = {"fresh_us": [], "touched_us": [], "written_only_us": []}

    def sequence(store: KVStore, first: int) -> float:
        begin = time.perf_counter()
        kv = store.reserve(first, rows)
        while True:
            for start in range(kv.length, kv.capacity, BLOCK):
                stop = min(start + BLOCK, kv.capacity)
                for layer in range(len(MODEL.layers)):
                    kv.write(layer, *(part[:, :, start:stop] for part in written))
                kv.commit(stop - start)
            if kv.length == rows:
                break
            store.grow(kv)
        seconds = time.perf_counter() - begin
        store.release(kv)
        return seconds * 1e6 / rows

    for _ in range(turns):
        store = KVStore(MODEL, 8 * MODEL.nbytes(rows))
        found["fresh_us"].append(sequence(store, BLOCK))
        found["touched_us"].append(sequence(store, BLOCK))
        found["written_only_us"].append(sequence(store, rows))
    return {name: min(times) for name, times in found.items()}


def gathering_costs(context: int) -> dict[str, float]:
    """Milliseconds a layer, of a chunk of a prompt behind ``context`` tokens: its attention, and what it would take to
    gather its keys and values out of blocks."""
    blocks = torch.ones(2, context // BLOCK, 4, BLOCK, 128, dtype=torch.bfloat16)
    table = torch.randperm(context // BLOCK)
    query = torch.ones(1, 32, CHUNK, 128, dtype=torch.bfloat16)
    attending, gathering = [], []
    for _ in range(7):
        begin = time.perf_counter()
        keys, values = (part[table].transpose(0, 1).reshape(1, 4, context, 128) for part in blocks)
        gathering.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
        attending.append(time.perf_counter() - begin)
    return {"attention_ms": min(attending) * 1e3, "gathering_ms": min(gathering) * 1e3}


@click.command(help=__doc__)
@click.option("--kv-memory", default="3MiB", show_default=True)
@click.option("--chats", "count", type=click.IntRange(1), default=24, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
def main(kv_memory: str, count: int, rounds: int) -> None:
    cache = cache_folder()
    click.echo(describe_machine(cache))
    running = at_once(cache, kv_memory, count)
    click.echo(f"{count} chats in {kv_memory}: " + ", ".join(f"{way} {most} at once" for way, most in running.items()))
    with model(cache, expects=None, profile=True, dtype="float32", kv_memory=kv_memory) as llm:
        fits = run(llm, chats(AT_ONCE, seed=6)).most_running
    over = overload(cache, kv_memory, fits, rounds)
    long = unforeseen(cache, kv_memory, count)
    for asked, way, of in (
        *((over["chats"], way, of) for way, of in over["ways"].items()),
        (count, "growing, 150 tokens where 1 was expected", long),
    ):
        click.echo(
            f"{asked} chats, fp32, {way}: {of['most_running']} at once, {of['texts_changed']} texts changed, "
            f"{of['preemptions']} preempted, {of['rows_twice']:.1%} of rows twice, {of['tokens_per_s']:.0f} tokens/s"
        )
    click.echo(f"growing over reserving, tokens/s in the same round: {over['tokens_per_s_over_reserving']:.2f}")
    growing = growing_costs(1024)
    click.echo("a row of 96 KiB, µs: " + ", ".join(f"{name[:-3]} {us:.1f}" for name, us in growing.items()))
    gathering = {context: gathering_costs(context) for context in CONTEXTS}
    for context, of in gathering.items():
        click.echo(
            f"{CHUNK} rows behind {context}, a layer: attention {of['attention_ms']:.2f} ms, "
            f"gathering blocks {of['gathering_ms']:.2f} ms"
        )
    click.echo(
        json.dumps(
            {"at_once": running, "overload": over, "unforeseen": long, "growing": growing, "gathering": gathering}
        )
    )


if __name__ == "__main__":
    main()
