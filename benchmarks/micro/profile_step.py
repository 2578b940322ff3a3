"""Where a step's time goes, with all experts resident and with a third of them.

    python -m benchmarks.profile_step [--model widened] [--policy lru] [--concurrency 1] [--out FOLDER]

Each case is a process; they take turns, round by round. Timing every method makes a step a little slower. Prints a
table, writes a picture, and prints one JSON object on its last line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.children.greenroom_child import CONCURRENCY, greenroom_child
from benchmarks.harness.children.processes import Child, Children, exit_on_sigterm
from benchmarks.harness.inputs.prepared_models import (
    MODELS,
    QUICK_SIZES,
    RANDOM,
    WIDENED,
    PreparedModel,
    Sizes,
    prepare,
)
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.plots import panels_of, save
from benchmarks.harness.reporting.progress import progress
from benchmarks.harness.reporting.results import write_result
from benchmarks.harness.rows import RESIDENT, THIRD
from benchmarks.harness.turn import Trace, Turn

TURN_TIMEOUT_S = 300.0
SHARES = (RESIDENT, THIRD)


@dataclass(frozen=True)
class Profile:
    """One case, mean of its rounds. ``parts``: milliseconds a step. ``step_ms``: of the turns that were not
    instrumented.

    ``expert_read``: bytes/s at which the experts' products read their weights; ``memory_read``: what the memory gives
    to a plain read. ``moved``: bytes/s over the link during the whole turn; ``link``: what it gives to a plain read.
    """

    model: str
    share: str
    concurrency: int
    parts: dict[str, float]
    step_ms: float
    expert_read: float
    memory_read: float
    moved: float
    link: float

    @property
    def instrumented_ms(self) -> float:
        return sum(self.parts.values())

    @property
    def overhead(self) -> float:
        """How much slower a step is for being instrumented."""
        return self.instrumented_ms / self.step_ms - 1

    def limits(self) -> dict[str, str]:
        """Of the parts that a rate can be given for, that rate beside what the machine gives."""
        found = {"experts": f"{self.expert_read / 1e9:.1f} of {self.memory_read / 1e9:.1f} GB/s of memory read"}
        if self.moved:
            found["waiting"] = f"{self.moved / 1e9:.2f} of {self.link / 1e9:.2f} GB/s of the link, over the whole step"
        return found


def profile_of(
    model: str,
    share: str,
    concurrency: int,
    turns: list[tuple[Turn, Turn]],
    trace: Trace,
    facts: dict[str, Any],
    memory_read: float,
) -> Profile:
    """``turns``: of each round the plain and the instrumented one. ``trace``: of the same stream."""
    instrumented = [watched for _, watched in turns]
    steps = sum(turn.steps for turn in instrumented)
    seconds = {part: sum(turn.inside[part] for turn in instrumented) for part in instrumented[0].inside}
    plain = sum(turn.seconds for turn, _ in turns)
    links = [turn.link for turn, _ in turns if turn.link]
    experts = seconds["experts"] / len(turns)
    return Profile(
        model=model,
        share=share,
        concurrency=concurrency,
        parts={part: 1e3 * value / steps for part, value in seconds.items()},
        step_ms=1e3 * plain / sum(turn.steps for turn, _ in turns),
        expert_read=trace.accesses * int(facts["expert_bytes"]) / experts if experts else 0.0,
        memory_read=memory_read,
        moved=sum(turn.bytes_moved for turn, _ in turns) / plain,
        link=sum(links) / len(links) if links else 0.0,
    )


def table(profiles: list[Profile]) -> str:
    """Parts down, cases across, in Markdown."""
    heads = [f"{p.model}, {p.share}" + (f", ×{p.concurrency}" if p.concurrency > 1 else "") for p in profiles]
    lines = ["| ms a step | " + " | ".join(heads) + " |", "| --- |" + " --- |" * len(heads)]
    for part in profiles[0].parts:
        cells = []
        for profile in profiles:
            limit = profile.limits().get(part, "")
            share = profile.parts[part] / profile.instrumented_ms
            cells.append(f"{profile.parts[part]:.2f} ({share:.0%})" + (f"; {limit}" if limit else ""))
        lines.append(f"| {part} | " + " | ".join(cells) + " |")
    lines.append("| a step | " + " | ".join(f"{p.instrumented_ms:.2f}" for p in profiles) + " |")
    lines.append(
        "| not instrumented | " + " | ".join(f"{p.step_ms:.2f} ({p.overhead:+.0%} by it)" for p in profiles) + " |"
    )
    return "\n".join(lines)


def picture(profiles: list[Profile], path: Path) -> None:
    """A stacked bar for each case. Raises PlotUnavailable."""
    figure, (axes,) = panels_of(1, 1, height=1.2 + 0.6 * len(profiles))
    names = [f"{p.model} {p.share}" + (f" ×{p.concurrency}" if p.concurrency > 1 else "") for p in profiles]
    left = [0.0] * len(profiles)
    for place, part in enumerate(profiles[0].parts):
        widths = [profile.parts[part] for profile in profiles]
        axes.barh(names, widths, left=left, label=part, color=f"C{place}")
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms a step")
    axes.legend(fontsize=9, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save(figure, path)


@click.command()
@click.option("--model", "models", multiple=True, type=click.Choice(MODELS), default=(WIDENED, RANDOM),
              show_default=True)  # fmt: skip
@click.option("--policy", default="lru", show_default=True, metavar="NAME[:OPTION=VALUE,...]")
@click.option("--concurrency", "at_once", multiple=True, type=click.Choice(("1", str(CONCURRENCY))),
              default=("1", str(CONCURRENCY)), show_default=True)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="Small models, one round: to see that it works.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("artifacts/profile-step"),
              show_default=True, help="Folder for profile.png and profile.json.")  # fmt: skip
def main(models: tuple[str, ...], policy: str, at_once: tuple[str, ...], rounds: int, quick: bool, out: Path) -> None:
    """Where a step's time goes, with all experts resident and with a third of them."""
    exit_on_sigterm()
    concurrency = tuple(map(int, at_once))
    sizes = QUICK_SIZES if quick else Sizes()
    parent = cache_folder()
    parent.mkdir(parents=True, exist_ok=True)
    profiles: list[Profile] = []
    with Children() as children:
        for name in models:
            profiles += _measure(name, policy, concurrency, 1 if quick else rounds, sizes, children)
            children.close_all_but()
    print(table(profiles))
    picture(profiles, out / "profile.png")
    result = {
        "machine": describe_machine(parent),
        "policy": policy,
        "profiles": [
            {**vars(profile), "parts": {part: round(ms, 4) for part, ms in profile.parts.items()}}
            for profile in profiles
        ],
    }
    print(f"picture: {out / 'profile.png'}")
    print(write_result(result, out / "profile.json"))


def _measure(
    name: str, policy: str, concurrency: tuple[int, ...], rounds: int, sizes: Sizes, children: Children
) -> list[Profile]:
    model = prepare(children, name, sizes)
    cases = [(share, at_once) for at_once in concurrency for share in SHARES]
    opened = {share: children.get(greenroom_child(model.folder, share, policy)) for share in SHARES}
    turns: dict[tuple[str, int], list[tuple[Turn, Turn]]] = {case: [] for case in cases}
    traces: dict[tuple[str, int], Trace] = {}
    bar = progress(len(cases) * (rounds + 1), name, "turn")
    with bar:
        for round_ in range(rounds + 1):
            for case in cases:
                share, at_once = case
                child = opened[share]
                if round_ == 0:
                    trace = _turn(child, model, at_once, record=True).trace
                    assert trace is not None
                    traces[case] = trace
                else:
                    plain = _turn(child, model, at_once, link=share != RESIDENT)
                    turns[case].append((plain, _turn(child, model, at_once, inside=True)))
                bar.update()
    read = float(opened[RESIDENT].tell("memory_read", TURN_TIMEOUT_S))
    return [
        profile_of(name, *case, turns[case], traces[case], opened[case[0]].description, read)
        for case in cases
    ]  # fmt: skip


def _turn(child: Child, model: PreparedModel, concurrency: int, **extra: bool) -> Turn:
    arguments = {**model.stream.as_arguments(), "concurrency": concurrency, **extra}
    return Turn.of_json(child.tell("run", TURN_TIMEOUT_S, **arguments))


if __name__ == "__main__":
    main()
