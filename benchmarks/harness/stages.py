"""A benchmark of several stages, run one after the other, and the command of one whose stages are modules.

A stage that is a module of its name in the benchmark's package has ``run(scale)``, whose result is its JSON,
``table(found)``, ``draw(found, path)``, a frozen dataclass ``Scale`` whose defaults are the whole run, and ``QUICK``, a
small one. A ``Scale`` with a field ``seeds`` takes ``--seeds``, one with ``trace`` ``--trace``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from benchmarks.harness.children.processes import exit_on_sigterm
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.reporting.aims import Aim, figure_lines
from benchmarks.harness.reporting.plots import picture
from benchmarks.harness.reporting.results import write_result

Say = Callable[[str], object]
Stage = Callable[[], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What was asked for. ``seeds`` and ``trace`` None: as each stage has it."""

    quick: bool
    out: Path
    seeds: int | None = None
    trace: Path | None = None


def run_named(
    stages: Mapping[str, Stage], aims: Mapping[str, Aim], say: Say, *, beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Figures with aims on top, then what each stage found under its name. A stage that fails costs only itself.

    ``beside``: figures without an aim that are put on top too. Whatever no stage measured is None.
    """
    on_top = (*aims, *beside)
    found: dict[str, Any] = dict.fromkeys(on_top)
    for name, stage in stages.items():
        say(f"\n== {name}")
        try:
            own = stage()
        except Exception as error:
            own = {"error": f"{type(error).__name__}: {error}"}
            say(f"failed: {own['error']}")
        found |= {figure: own[figure] for figure in on_top if own.get(figure) is not None}
        found[name] = own
    say("")
    say("\n".join(figure_lines({name: found[name] for name in aims}, aims)))
    return found


def kept(found: Mapping[str, Any], file: Path, *, quick: bool, seconds: float) -> str:
    """One line of JSON, of what was found and what it ran on, which is in ``file`` too."""
    machine = describe_machine(cache_folder())
    return write_result({**found, "quick": quick, "seconds": round(seconds, 1), "machine": machine}, file)


def run_module(package: str, stage: str, settings: Settings, say: Say) -> dict[str, Any]:
    """A stage that is a module, imported now: its JSON with the ``seconds`` that it took."""
    began = time.monotonic()
    module = import_module(f"{package}.{stage}")
    found: dict[str, Any] = module.run(scale_of(module, settings))
    say(module.table(found))
    picture(lambda: module.draw(found, settings.out / f"{stage}.png"), say)
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def scale_of(module: Any, settings: Settings) -> Any:
    """How much a stage's module is to do: its own scale, but for what was asked for."""
    scale = module.QUICK if settings.quick else module.Scale()
    asked = {"seeds": settings.seeds, "trace": settings.trace}
    known = {field.name for field in fields(scale)}
    return replace(scale, **{name: value for name, value in asked.items() if name in known and value is not None})


def modules_command(
    package: str,
    stages: Sequence[str],
    aims: Mapping[str, Aim],
    *,
    name: str,
    text: str,
    examples: str,
    beside: Iterable[str] = (),
) -> click.Command:
    """The command line of a benchmark whose stages are modules of ``package``. Its result is ``name``.json.

    ``text`` and ``examples``: for its help. ``beside``: see ``run_named``.
    """

    @click.command(help=text, epilog=examples)
    @click.option("--stage", "chosen", multiple=True, type=click.Choice(stages), help="Only these.  [default: all]")
    @click.option("--quick", is_flag=True, help="Small models and short traces: to see that it works.")
    @click.option(
        "--seeds", type=click.IntRange(min=2), help="Runs of what is random.  [default: as each stage has it]"
    )
    @click.option("--trace", type=click.Path(exists=True, dir_okay=False, path_type=Path),
                  help="A recorded routing, for the stages that take one.")  # fmt: skip
    @click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path(f"artifacts/bench-{name}"),
                  show_default=True, help=f"Folder for the pictures and the result ({name}.json).")  # fmt: skip
    def main(chosen: tuple[str, ...], quick: bool, seeds: int | None, trace: Path | None, out: Path) -> None:
        exit_on_sigterm()
        out.mkdir(parents=True, exist_ok=True)
        settings = Settings(quick, out, seeds, trace)
        began = time.monotonic()
        runs = {stage: partial(run_module, package, stage, settings, click.echo) for stage in chosen or stages}
        found = run_named(runs, aims, click.echo, beside=beside)
        click.echo(kept(found, out / f"{name}.json", quick=quick, seconds=time.monotonic() - began))

    return main
