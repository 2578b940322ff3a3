"""``greenroom-load plot``: pictures of results that were saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from greenroom.core.errors import InvalidConfig


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", "prefix", type=click.Path(path_type=Path), default=Path("load"), show_default=True,
              help="The pictures are PREFIX-latency, PREFIX-time and PREFIX-rate.")  # fmt: skip
@click.option("--format", "kind", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True,
              help="Kind of picture.")  # fmt: skip
def plot(files: tuple[Path, ...], prefix: Path, kind: str) -> None:
    """Draw FILES, the JSON of `run` and `sweep`, several of them in one picture.

    Runs are drawn as distributions of their latencies and over time, sweeps as goodput and latency against the rate.

    \b
    Examples:
      greenroom-load plot result.json
      greenroom-load plot lru.json look-ahead.json --out docs/policies --format svg
    """
    from greenroom_load.plot import check_plots, draw

    check_plots(prefix)
    results: dict[str, Any] = {}
    for file in files:
        result = _read(file)
        name = result.get("label") or file.stem
        results[name if name not in results else str(file)] = result
    for path in draw(results, prefix, kind=kind):
        click.echo(path)


def _read(file: Path) -> dict[str, Any]:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidConfig("files", str(file), f"JSON that greenroom-load has written ({error})") from error
    if not isinstance(result, dict) or not str(result.get("kind", "")).startswith("greenroom-load"):
        raise InvalidConfig("files", str(file), "JSON that `greenroom-load run` or `sweep` has written with --json")
    return result
