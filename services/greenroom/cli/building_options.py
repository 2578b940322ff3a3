"""What a predictor makes for the expert policies of workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.option_stack import stack

if TYPE_CHECKING:
    from greenroom.predictor.kinds.config import BuildingConfig

building_options = stack(
    click.option(
        "--build",
        default="asked",
        show_default=True,
        help="What to make of live traces for workers' expert policies: eamc (of moe-infinity; needs greenroom[eamc]), "
        "path (of duoserve), paths (of expertflow, from --trace-tokens), reuse, expert_mlp (of duoserve:literal=true), "
        "or several separated by commas; `asked`: what workers ask for; none.",
    ),
    click.option(
        "--eamc-share",
        type=float,
        default=0.9,
        show_default=True,
        help="A sequence was foreseen badly if its prefetch recall is below this share of what is usual since the last "
        "rebuild.",
    ),
    click.option(
        "--eamc-least", type=float, default=0.0, show_default=True, help="Or if it is below this, whatever is usual."
    ),
    click.option(
        "--eamc-after",
        type=int,
        default=100,
        show_default=True,
        help="Rebuild the EAMC after so many sequences that were foreseen badly.",
    ),
    click.option(
        "--eamc-again", type=int, default=1000, show_default=True, help="And after so many of any kind since the last."
    ),
    click.option(
        "--eamc-settle",
        type=int,
        default=50,
        show_default=True,
        help="Sequences after a rebuild whose median recall is what is usual from then on.",
    ),
    click.option("--eamc-capacity", type=int, default=100, show_default=True, help="Most members of an EAMC."),
    click.option(
        "--reuse-after",
        type=int,
        default=100,
        show_default=True,
        help="Fit what reuse and duoserve predict by when so many sequences of a model have come.",
    ),
    click.option(
        "--paths-form",
        type=click.Choice(["tables", "t5", "best"]),
        default="tables",
        show_default=True,
        help="What paths are made as: tables of tokens, a T5 (needs torch), or both, and the better is published.",
    ),
    click.option(
        "--paths-shared-by",
        type=click.IntRange(min=1),
        default=5,
        show_default=True,
        help="Tokens, pairs and triples of tokens are in what is made of --trace-tokens only where so many sequences "
        "have them. At 1 texts can be read back from it.",
    ),
    click.option("--reuse-again", type=int, default=1000, show_default=True, help="And anew when so many more have."),
    click.option(
        "--build-memory", default="64MiB", show_default=True, help="For the last sequences of all models, to build of."
    ),
    click.option(
        "--build-timeout", type=float, default=600.0, show_default=True, help="Seconds that one build may take."
    ),
)


def building_from(options: dict[str, Any]) -> BuildingConfig:
    """Takes the options of ``building_options`` out of ``options``. Raises InvalidConfig, UnknownName."""
    from greenroom.core.units import parse_bytes
    from greenroom.predictor.kinds.config import DriftConfig
    from greenroom.predictor.kinds.registry import building_of

    drift = {name: options.pop(f"eamc_{name}") for name in ("share", "least", "after", "again", "settle")}
    reuse_after = options.pop("reuse_after")
    return building_of(
        options.pop("build"),
        drift=DriftConfig(**drift),
        capacity=options.pop("eamc_capacity"),
        reuse_after=reuse_after,
        reuse_again=options.pop("reuse_again"),
        paths_form=options.pop("paths_form"),
        paths_shared_by=options.pop("paths_shared_by"),
        max_bytes=parse_bytes(options.pop("build_memory"), field="build_memory"),
        max_sequences=max(1000, 2 * drift["after"], 2 * reuse_after),
        timeout_s=options.pop("build_timeout"),
    )
