"""Running the parts of a benchmark one after the other, and how their figures stand to their aims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.aims import Aim, figure_lines
from benchmarks.harness.machine import cache_folder, describe_machine
from benchmarks.harness.results import write_result

Say = Callable[[str], object]
Stage = Callable[[], dict[str, Any]]


def run_named(
    stages: Mapping[str, Stage], aims: Mapping[str, Aim], say: Say, *, beside: Iterable[str] = ()
) -> dict[str, Any]:
    """Figures with aims on top, then what each stage found under its name. A stage that fails costs only itself.

    ``beside``: figures without an aim that are put on top too. Whatever no stage measured is None.
    """
    found: dict[str, Any] = dict.fromkeys((*aims, *beside))
    for name, stage in stages.items():
        say(f"\n== {name}")
        try:
            own = stage()
        except Exception as error:
            own = {"error": f"{type(error).__name__}: {error}"}
            say(f"failed: {own['error']}")
        found |= {figure: own[figure] for figure in found if own.get(figure) is not None}
        found[name] = own
    say("")
    say("\n".join(figure_lines({name: found[name] for name in aims}, aims)))
    return found


def kept(found: Mapping[str, Any], file: Path, *, quick: bool, seconds: float) -> str:
    """One line of JSON, of what was found and what it ran on, which is in ``file`` too."""
    machine = describe_machine(cache_folder())
    return write_result({**found, "quick": quick, "seconds": round(seconds, 1), "machine": machine}, file)
