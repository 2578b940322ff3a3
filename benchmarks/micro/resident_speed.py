"""How fast a model is whose experts are all in memory: by instruction set, beside transformers' best.

    python -m benchmarks.resident_speed [--model widened] [--instructions avx512bf16 --instructions avx512] [--rounds 5]

One prompt at a time and eight at once, in tokens/s; prompts of 30, 256 and 900 tokens up to their first token, in
milliseconds; --model long has prompts of 900 and 8,000 alone. Every instruction set is a process of its own
(GREENROOM_INSTRUCTIONS), and so is transformers, each of whose experts' implementations takes its turn; the fastest of
them is what the first instruction set is compared with.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
from transformers import AutoConfig

from benchmarks.harness.arms.transformers_arms import IMPLEMENTATIONS
from benchmarks.harness.children.greenroom_child import CONCURRENCY, greenroom_child
from benchmarks.harness.children.processes import Child, Children, ChildSpec, exit_on_sigterm
from benchmarks.harness.inputs.prepared_models import LONG, MODELS, PreparedModel, Sizes, prepare
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.statistics import Spread, spread_json
from benchmarks.harness.reporting.tables import median_range
from benchmarks.harness.rounds import rotated
from benchmarks.harness.rows import RESIDENT
from greenroom.moe.native.rows import ALL_INSTRUCTION_SETS, INSTRUCTIONS, native_rows

PROMPTS: Final = (30, 256, 900, 8000)
TIMES: Final = 3
"""A prompt is run in a turn, so that one bad moment does not decide."""
COSTLY: Final = "batched_mm"
"""It copies a row's experts for every row: of one row alone."""
TURN_S: Final = 300.0


@dataclass(frozen=True, slots=True)
class Work:
    """``tokens``: a prompt of so many, up to its first token. None: the stream, so many ``at_once``."""

    at_once: int = 1
    tokens: int | None = None

    @property
    def name(self) -> str:
        if self.tokens is not None:
            return f"a prompt of {self.tokens}"
        return "one at a time" if self.at_once == 1 else f"{self.at_once} at once"

    def arguments(self, model: PreparedModel) -> dict[str, Any]:
        if self.tokens is None:
            return {**model.stream.as_arguments(), "concurrency": self.at_once}
        known = [token for prompt in model.stream.prompts for token in prompt]
        prompt = (known * (self.tokens // len(known) + 1))[: self.tokens]
        return {"prompts": [prompt] * TIMES, "lengths": [1] * TIMES}

    def figure(self, turn: Mapping[str, Any]) -> float:
        """Tokens/s, or milliseconds of a prompt."""
        if self.tokens is None:
            return float(turn["tokens"]) / float(turn["seconds"])
        return 1e3 * float(turn["seconds"]) / TIMES

    def gain(self, ours: float, theirs: float) -> float:
        """How many times as fast the first figure is."""
        return ours / theirs if self.tokens is None else theirs / ours


@dataclass(frozen=True, slots=True)
class Arm:
    """``implementation``: transformers' own."""

    name: str
    spec: ChildSpec
    implementation: str | None = None

    def takes(self, work: Work) -> bool:
        return self.implementation != COSTLY or (work.tokens is None and work.at_once == 1)

    def run(self, child: Child, work: Work, model: PreparedModel) -> float:
        more = {} if self.implementation is None else {"implementation": self.implementation}
        return work.figure(child.tell("run", TURN_S, **work.arguments(model), **more))


def works(model: PreparedModel) -> list[Work]:
    """What the model's context has room for."""
    room = int(AutoConfig.from_pretrained(model.folder).max_position_embeddings) - 1
    of_prompts = [Work(tokens=tokens) for tokens in PROMPTS if tokens <= room]
    return of_prompts[-2:] if model.name == LONG else [Work(), Work(CONCURRENCY), *of_prompts]


def arms(model: PreparedModel, sets: tuple[str, ...]) -> list[Arm]:
    ours = [
        Arm(name, greenroom_child(model.folder, RESIDENT, "lru", environment={INSTRUCTIONS: name})) for name in sets
    ]
    theirs = ChildSpec.of("transformers", {"model": str(model.folder)})
    return [*ours, *(Arm(f"transformers, {name}", theirs, name) for name in IMPLEMENTATIONS)]


def measured(children: Children, model: PreparedModel, sets: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """``figures``: of each work each arm's spread; ``ratios``: of each work how many times as fast the first set is as
    transformers' best, and as each other set."""
    todo, those = works(model), arms(model, sets)
    found: dict[tuple[str, str], list[float]] = {}
    pairs = [(work, arm) for work in todo for arm in those if arm.takes(work)]
    with progress((rounds + 1) * len(pairs), f"{model.name}: resident", "turn") as bar:
        for round_ in range(rounds + 1):
            for work, arm in rotated(pairs, round_):
                figure = arm.run(children.get(arm.spec), work, model)
                if round_:  # the first makes code and touches pages
                    found.setdefault((work.name, arm.name), []).append(figure)
                bar.update()
    figures = {
        work.name: {arm.name: spread_json(Spread.of(found[work.name, arm.name]), 2) for arm in those if arm.takes(work)}
        for work in todo
    }
    gained = {
        work.name: ratios(work, {arm.name: found.get((work.name, arm.name), []) for arm in those}) for work in todo
    }
    return {"model": model.name, "figures": figures, "ratios": gained}


def ratios(work: Work, of_arms: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of the first arm over each other instruction set, and over the fastest of transformers', round by round. Arms
    without figures are left out."""
    first, *others = of_arms
    gains = {
        name: [work.gain(own, one) for own, one in zip(of_arms[first], of_arms[name], strict=True)]
        for name in others
        if of_arms[name]
    }
    best = min(gains.keys() - set(ALL_INSTRUCTION_SETS), key=lambda name: statistics.median(gains[name]))
    kept = [name for name in gains if name in ALL_INSTRUCTION_SETS or name == best]
    return {name: spread_json(Spread.of(gains[name]), 3) for name in kept}


def summary(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures that have aims: over transformers' best, the medians of the worst model.

    ``resident_ratio``: one at a time; ``resident_8_ratio``: eight at once; ``prefill_ratio``: by tokens of the prompt;
    ``concurrency_ratio``: by model, tokens/s of eight at once over one.
    """
    over: dict[str, list[float]] = {}
    for model in models:
        for work, gains in model["ratios"].items():
            for name, spread in gains.items():
                if name not in ALL_INSTRUCTION_SETS:
                    over.setdefault(work, []).append(spread["median"])
    worst = {work: min(gains) for work, gains in over.items()}
    alone, together = Work(), Work(CONCURRENCY)
    return {
        "resident_ratio": worst.get(alone.name),
        "resident_8_ratio": worst.get(together.name),
        "prefill_ratio": {
            str(tokens): worst[work.name] for tokens in PROMPTS if (work := Work(tokens=tokens)).name in worst
        },
        "concurrency_ratio": {
            model["model"]: round(_concurrency(model["figures"], alone, together), 3)
            for model in models
            if alone.name in model["figures"]
        },
    }


def _concurrency(figures: Mapping[str, Mapping[str, Any]], alone: Work, together: Work) -> float:
    """Of the first arm."""
    first = next(iter(figures[alone.name]))
    return float(figures[together.name][first]["median"] / figures[alone.name][first]["median"])


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{found['model']}: tokens/s, and milliseconds of a prompt"]
    for work, figures in found["figures"].items():
        lines += [f"  {work:<18}{name:<28}{median_range(spread):>32}" for name, spread in figures.items()]
        first = next(iter(figures))
        said = ", ".join(f"{name} {median_range(spread, 2)}" for name, spread in found["ratios"][work].items())
        lines.append(f"  {work}: {first} is so many times as fast as {said}")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.option(
    "--model", "models", type=click.Choice((*MODELS, LONG)), multiple=True, default=MODELS, show_default="all but long"
)
@click.option("--instructions", "sets", type=click.Choice(ALL_INSTRUCTION_SETS), multiple=True)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--expert-mib", type=float, hidden=True, help="Of the widened and the random model.")
def main(models: tuple[str, ...], sets: tuple[str, ...], rounds: int, expert_mib: float | None) -> None:
    exit_on_sigterm()
    here = native_rows().instruction_sets
    if unknown := [name for name in sets if name not in here]:
        raise click.UsageError(f"this processor has no {', '.join(unknown)}; it has {', '.join(here)}")
    sizes = Sizes() if expert_mib is None else Sizes(widened_mib=expert_mib, random_mib=expert_mib)
    found = []
    for name in models:
        with Children() as children:
            found.append(measured(children, prepare(children, name, sizes), sets or here[:2], rounds))
        click.echo(table(found[-1]))
    figures = summary(found)
    for name, value in figures.items():
        click.echo(f"{name}: {value}")
    click.echo(json.dumps({**figures, "rounds": rounds, "models": found, "machine": describe_machine(cache_folder())}))


if __name__ == "__main__":
    main()
