"""``greenroom coe profile``: what a collaboration's experts cost on this machine."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from greenroom import __version__
from greenroom.cli.numbers import SEED, NumberRange
from greenroom.cli.progress_bars import progress_bars
from greenroom.core.coe_profile import PROFILE_FILE

if TYPE_CHECKING:
    from greenroom.coe.graph.expert_graph import Shares
    from greenroom.coe.loading.collaboration import Collaboration
    from greenroom.profiling.coe.sample_inputs import Samples

_MOST_EXECUTORS = 8


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--offline", is_flag=True, help="Of the hub use only what was downloaded before; no network.")
@click.option(
    "--memory",
    default="50%",
    show_default=True,
    help="For experts and what batches compute, of all executors: a size such as 2GiB, or a share of what is free now.",
)
@click.option(
    "--executors",
    type=click.IntRange(min=1),
    help=f"The most that are tried.  [default: one a core, at most {_MOST_EXECUTORS}]",
)
@click.option(
    "--samples",
    type=click.Path(exists=True, path_type=Path),
    help='A folder of PNG or JPEG, a file of texts (one a line), or JSON Lines {"file" or "text": …, "experts": '
    "[names]}.  [default: random inputs of the size that each checkpoint works with]",
)
@click.option(
    "--count-usage",
    is_flag=True,
    help="How often experts are used, counted from the `experts` of the samples, not from the definition's quantities.",
)
@click.option(
    "--scheduling",
    type=click.Choice(("coserve", "pull")),
    default="coserve",
    show_default=True,
    help="What executors and residents are tried with.",
)
@click.option(
    "--first-window",
    type=NumberRange(min=0, min_open=True, max=100),
    default=15.0,
    show_default=True,
    help="The decay window's initial size, in percent of the experts that fit.",
)
@click.option(
    "--draw",
    is_flag=True,
    help="Take a number of residents drawn in the window, as the paper does, not the best one found.",
)
@click.option("--largest-batch", type=click.IntRange(min=2), default=64, show_default=True, help="That is measured.")
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True, help="Medians are over so many.")
@click.option("--requests", type=click.IntRange(min=1), default=2000, show_default=True, help="Of a replay.")
@click.option(
    "--serve",
    is_flag=True,
    help="Serve the points that matter with the real engine too, to judge the replay by. Takes a minute more.",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="What all that is drawn follows.")
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
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"The file to write; pictures go beside it.  [default: {PROFILE_FILE} beside FILE]",
)
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw pictures of what was measured.")
@click.option("--quick", is_flag=True, help="A first look in seconds: batches up to 8, two rounds, short replays.")
def profile(
    file: Path,
    offline: bool,
    memory: str,
    executors: int | None,
    samples: Path | None,
    count_usage: bool,
    scheduling: str,
    first_window: float,
    draw: bool,
    largest_batch: int,
    rounds: int,
    requests: int,
    serve: bool,
    seed: int,
    dtype: str,
    cache_dir: Path | None,
    output: Path | None,
    plots: bool,
    quick: bool,
) -> None:
    """Measure what the experts of a definition cost on this machine, and how memory and executors serve them best.

    By architecture: what a batch takes, from which size on larger ones are no faster, the memory of a batch, and
    loading. Then the number of executors, and how many experts memory should hold, are tried on a replayed burst of
    requests. Writes one JSON file, for services to load, and pictures. Let the machine be idle meanwhile.
    docs/architecture/coe.md

    \b
    Examples:
      greenroom coe profile board.toml --memory 2GiB
      greenroom coe profile board.toml --memory 2GiB --samples crops/
      greenroom coe profile board.toml --quick --output /tmp/board-profile.json
      greenroom coe profile board.toml --memory 2GiB --scheduling pull --executors 4
      greenroom coe profile board.toml --memory 2GiB --serve
    """
    from greenroom.coe.loading.collaboration import read_collaboration
    from greenroom.core.coe_profile import dump_coe_profile
    from greenroom.core.errors import GreenroomError
    from greenroom.core.files import write_whole
    from greenroom.core.machine import machine_name
    from greenroom.core.pictures import check_drawing
    from greenroom.core.units import parse_bytes
    from greenroom.worker.usable_memory import memory as usable_memory

    if plots:
        check_drawing()
    memory_bytes = parse_bytes(memory, field="memory", whole=usable_memory().available)
    collaboration = read_collaboration(file, offline=offline)
    path = output or file.parent / PROFILE_FILE
    _check_free(path, collaboration)
    read, usage = _samples(collaboration, samples, count_usage=count_usage)

    # torch takes seconds: what can be refused without it, was.
    from greenroom.profiling.coe.batch_timing import TimingPlan
    from greenroom.profiling.coe.config import CoeProfileConfig
    from greenroom.profiling.coe.profiler import Here, profile_collaboration
    from greenroom.profiling.coe.table import describe_coe_profile

    cores = len(os.sched_getaffinity(0))
    config = CoeProfileConfig(
        memory_bytes=memory_bytes,
        executors=executors or min(cores, _MOST_EXECUTORS),
        timing=TimingPlan(largest=largest_batch, rounds=rounds),
        requests=requests,
        initial_percent=first_window,
        scheduling=scheduling,
        draws=draw,
        seed=seed,
    )
    notes = {"command": shlex.join(["greenroom", *sys.argv[1:]]), "greenroom": __version__}
    with progress_bars() as on_progress:
        made = profile_collaboration(
            collaboration,
            config.quick() if quick else config,
            Here(machine_name(), cores),
            usage,
            read,
            notes,
            on_progress,
            dtype=dtype,
            cache_dir=cache_dir,
            serves=serve,
        )
    try:
        write_whole(path, dump_coe_profile(made))
    except OSError as error:
        raise GreenroomError(f"{path} could not be written: {error.strerror}; name another with --output") from error
    click.echo(describe_coe_profile(made))
    click.echo(f"\n{path}")
    if plots:
        from greenroom.profiling.coe.pictures import draw_coe_profile

        for picture in draw_coe_profile(made, path):
            click.echo(picture)


def _check_free(path: Path, collaboration: Collaboration) -> None:
    """Raises InvalidConfig unless the file may be written: it is none, or this collaboration's earlier profile."""
    from greenroom.core.coe_profile import load_coe_profile
    from greenroom.core.errors import InvalidConfig

    if not path.exists():
        return
    try:
        earlier = load_coe_profile(path)
    except InvalidConfig:
        raise InvalidConfig(
            "output", str(path), "it exists and is no profile of a collaboration; name another"
        ) from None
    if earlier.collaboration != collaboration.name:
        raise InvalidConfig(
            "output", str(path), f"it is the profile of {earlier.collaboration!r}, another collaboration; name another"
        )


def _samples(collaboration: Collaboration, path: Path | None, *, count_usage: bool) -> tuple[Samples | None, Shares]:
    """The samples, and how probably each expert is used."""
    graph = collaboration.graph
    if path is None:
        if count_usage:
            raise click.UsageError("--count-usage needs --samples, JSON Lines with the experts of each")
        return None, graph.usage()
    from greenroom.core.errors import InvalidConfig, UnknownName
    from greenroom.profiling.coe.sample_inputs import read_samples

    read = read_samples(path)
    if not count_usage:
        return read, graph.usage()
    if not read.paths:
        raise InvalidConfig("samples", str(path), 'lines that say "experts": [names], for --count-usage')
    keys = {name: key for key, name in enumerate(graph.names)}
    if unknown := sorted({name for names in read.paths for name in names} - keys.keys()):
        raise UnknownName("experts", unknown[0], graph.names[:20])
    return read, graph.counted_usage([[keys[name] for name in names] for names in read.paths])
