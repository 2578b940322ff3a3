"""``greenroom coe``: collaborations of experts, pipelines of whole models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.coe_demo import demo
from greenroom.cli.coe_profile import profile
from greenroom.cli.option_stack import stack
from greenroom.core.units import format_bytes

if TYPE_CHECKING:
    from greenroom.coe.loading.collaboration import Collaboration

_SHOWN = 20

_source = stack(
    click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
    click.option("--offline", is_flag=True, help="Of the hub use only what was downloaded before; no network."),
)


@click.group()
def coe() -> None:
    """Collaborations of experts (CoE): pipelines of whole models, of which a request needs one after another.

    \b
    Examples:
      greenroom coe demo board                experts that inspect a circuit board, and crops to send them
      greenroom coe check board/board.toml    is the definition sound, and what does it use
      greenroom coe profile board/board.toml  what do its experts cost here
    """


coe.add_command(demo)
coe.add_command(profile)


@coe.command()
@_source
@click.option("--all", "everything", is_flag=True, help=f"Every expert, not only the {_SHOWN} that are used most.")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def check(file: Path, offline: bool, everything: bool, as_json: bool) -> None:
    """Check a definition and its experts' checkpoints, and show what they are.

    FILE is what docs/architecture/coe.md describes. No weights are read but their headers. What is wrong is named by
    file and expert.

    \b
    Examples:
      greenroom coe check board.toml
      greenroom coe check board.toml --all
      greenroom coe check board.toml --json | jq '.experts[] | select(.usage > 0.1)'
    """
    from greenroom.coe.loading.collaboration import read_collaboration

    told = _described(read_collaboration(file, offline=offline))
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        _print(told, None if everything else _SHOWN)


@coe.command()
@_source
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="What the weights are computed in: auto (each checkpoint's), bfloat16, float16, float32.",
)
@click.option(
    "--cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    envvar="GREENROOM_CACHE",
    help="Where expert packs are kept.  [default: ~/.cache/greenroom]",
)
@click.option("--force", is_flag=True, help="Make it anew even if it is there.")
def pack(file: Path, offline: bool, dtype: str, cache_dir: Path | None, force: bool) -> None:
    """Write the pack of all experts of a definition and print its path.

    It is made once, and found again while the checkpoints stay as they are.

    \b
    Examples:
      greenroom coe pack board.toml
      greenroom coe pack board.toml --dtype bfloat16 --cache-dir /mnt/fast
    """
    from greenroom.coe.loading.architecture import build_architectures
    from greenroom.coe.loading.collaboration import read_collaboration
    from greenroom.coe.loading.packing import ensure_pack

    collaboration = read_collaboration(file, offline=offline)
    architectures = build_architectures(collaboration, dtype)
    click.echo(ensure_pack(collaboration, architectures, cache_dir, force=force))


def _described(collaboration: Collaboration) -> dict[str, Any]:
    graph, router = collaboration.graph, collaboration.definition.router
    usage = graph.usage()
    numbers = {key: number for number, key in enumerate(collaboration.of_architecture())}
    experts = [
        {
            "name": name,
            "model": expert.model,
            "class": expert.model_class,
            "task": str(expert.task),
            "takes": str(expert.takes),
            "dtype": expert.dtype,
            "bytes": expert.weight_bytes,
            "labels": len(expert.labels),
            "architecture": numbers[expert.architecture],
            "usage": round(float(usage[key]), 6),
        }
        for key, (name, expert) in enumerate(zip(graph.names, collaboration.experts, strict=True))
    ]
    return {
        "name": collaboration.name,
        "router": {"parameter": router.parameter} if router.expert is None else {"expert": router.expert},
        "values": len(graph.values),
        "bytes": sum(expert.weight_bytes for expert in collaboration.experts),
        "experts_a_request": round(float(usage.sum()), 6),
        "architectures": [
            {
                "class": collaboration.experts[keys[0]].model_class,
                "experts": len(keys),
                "bytes": collaboration.experts[keys[0]].weight_bytes,
            }
            for keys in collaboration.of_architecture().values()
        ],
        "experts": experts,
    }


def _print(told: Mapping[str, Any], most: int | None) -> None:
    (by, name), *_ = told["router"].items()
    experts = sorted(told["experts"], key=lambda expert: -expert["usage"])
    rows = [
        ("collaboration", told["name"]),
        ("router", f"the {by} {name!r}, {told['values']} values"),
        ("experts", f"{len(experts)}, {format_bytes(told['bytes'])}"),
        ("a request", f"{told['experts_a_request']:.3g} experts on average"),
    ]
    for number, one in enumerate(told["architectures"]):
        rows.append((f"architecture {number}", f"{one['class']}, {one['experts']} of {format_bytes(one['bytes'])}"))
    for name, value in rows:
        click.echo(f"{name:<16}{value}")
    shown = experts[:most]
    width = max(len(expert["name"]) for expert in shown)
    click.echo(f"\n{'expert':<{width}}  {'usage':>7}  {'size':>9}  arch  task")
    for expert in shown:
        click.echo(
            f"{expert['name']:<{width}}  {expert['usage']:>7.2%}  {format_bytes(expert['bytes']):>9}  "
            f"{expert['architecture']:>4}  {expert['task']}"
        )
    if len(shown) < len(experts):
        click.echo(f"… and {len(experts) - len(shown)} that are used less: --all shows them")
