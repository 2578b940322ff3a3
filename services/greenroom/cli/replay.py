"""``greenroom replay``: what policies and budgets would make of recorded routing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.artifact_options import artifacts_from, replayed_artifact_options
from greenroom.cli.numbers import NumberRange
from greenroom.core.errors import InvalidConfig

if TYPE_CHECKING:
    from greenroom.experts.pack.direct_io import ReadSettings
    from greenroom.replay.simulation.simulated_hardware import LinkProfile
    from greenroom.replay.simulation.timed_replay import TimedReplay
    from greenroom.replay.sweeps.sweep import Sweep
    from greenroom.replay.traces.routing_trace import RoutingTrace

DEFAULT_TOKENS = 30_000
DEFAULT_TIMED_TOKENS = 1_000
ROWS_WORTH_A_PROCESS = 10_000
TIMED_ROWS_WORTH_A_PROCESS = 500


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    default=("lru", "lfu", "decayed", "next-use"),
    show_default=True,
    help="A policy, with options as in decayed:decay=0.999; may be given several times. `all` is each that has a rule "
    "for who leaves; with a link also those that fetch ahead.",
)
@click.option(
    "--budget",
    "budgets",
    multiple=True,
    default=("12.5%", "25%", "33.3%", "50%"),
    show_default=True,
    help="Experts resident: a number (96), a share (25%) or a size (2GiB); may be given several times.",
)
@click.option(
    "--concurrent",
    "concurrency",
    multiple=True,
    default=("1",),
    show_default=True,
    help="Sequences at once, or `recorded` for the steps as they ran; may be given several times.",
)
@click.option(
    "--tokens",
    type=click.IntRange(min=0),
    help=f"Rows to replay, 0 for all.  [default: {DEFAULT_TOKENS}; timed {DEFAULT_TIMED_TOKENS}]",
)
@click.option(
    "--belady/--no-belady",
    default=True,
    show_default=True,
    help="Beside them Belady's optimum, which knows what is to come.",
)
@click.option("--link", help="Predict times too, on a link of this speed and latency: 1.5GiB/s,0.2ms.")
@click.option(
    "--calibration",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The same from what was measured of an expert pack here (greenroom pack prints its path).",
)
@click.option(
    "--expert-bytes", help="Size of an expert, such as 11MiB.  [default: what the trace says, if it says anything]"
)
@click.option("--compute", help="What a layer computes besides its experts.  [default: 0ms]")
@click.option("--expert-compute", help="What each distinct expert of a layer adds.  [default: 0ms]")
@click.option("--host-memory", help="A host tier of this size between link and device; needs --host-link.")
@click.option("--host-link", help="Speed and latency from the host tier to the device.")
@click.option(
    "--recall",
    type=NumberRange(0, 1),
    help="Answer the policies' requests for predictions from the trace, with this recall.  [default: no answers]",
)
@replayed_artifact_options
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Cells (a policy under a budget) replayed at a time, in processes.  [default: one a core, where it pays]",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write all figures here.")
@click.option(
    "--plot", "plot_file", type=click.Path(dir_okay=False, path_type=Path), help="Draw them: .png, .svg or .pdf."
)
def replay(
    trace: Path,
    policies: tuple[str, ...],
    budgets: tuple[str, ...],
    concurrency: tuple[str, ...],
    tokens: int | None,
    belady: bool,
    link: str | None,
    calibration: Path | None,
    expert_bytes: str | None,
    compute: str | None,
    expert_compute: str | None,
    host_memory: str | None,
    host_link: str | None,
    recall: float | None,
    jobs: int | None,
    json_file: Path | None,
    plot_file: Path | None,
    **artifacts: Any,
) -> None:
    """Replay TRACE, an .npz of recorded routing, under policies and budgets, without the model.

    A table shows how many look-ups of an expert would find it in memory, of all policies under all budgets. Memory is
    one cache for all layers, empty at the start, and nothing is fetched ahead.

    With --link (or --calibration) the engine itself runs on a simulated link: its prefetches count, and further tables
    show tokens/s and how long it would wait. --compute to --recall are for this alone.

    \b
    Examples:
      greenroom replay routing.npz
      greenroom replay routing.npz --policy lru --policy decayed:decay=0.999 --budget 96 --budget 25% \\
          --concurrent 1 --concurrent 8 --plot hits.png --json hits.json
      greenroom replay routing.npz --link 1.5GiB/s,0.2ms --compute 0.3ms --expert-compute 0.8ms --expert-bytes 11MiB
      greenroom replay mine.npz --concurrent recorded --policy look-ahead --recall 0.9 --link 2GiB/s
    """
    from tqdm import tqdm

    from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
    from greenroom.core.artifacts.paths_file import PathsFile
    from greenroom.core.pictures import check_plot
    from greenroom.core.units import parse_bytes
    from greenroom.policies.base.artifacts import artifact_of
    from greenroom.policies.base.slot_sizes import SlotSizes
    from greenroom.policies.registry import check_given, check_taken, policy_class, spelling
    from greenroom.replay.simulation.paths_from_file import PathsFromFile
    from greenroom.replay.sweeps import report
    from greenroom.replay.sweeps.plot import plot
    from greenroom.replay.sweeps.sweep import Sweep, slots_of, specs_of
    from greenroom.replay.traces.routing_trace import RoutingTrace

    for option, file in (("json", json_file), ("plot", plot_file)):
        if file is not None and not file.parent.is_dir():
            raise InvalidConfig(option, str(file), "a file in a folder that exists")
    if plot_file is not None:
        check_plot(plot_file)
    recorded = RoutingTrace.load(trace, tokens=artifacts["paths"] is not None)
    size = None if expert_bytes is None else parse_bytes(expert_bytes, field="expert-bytes")
    if size == 0:
        raise InvalidConfig("expert-bytes", expert_bytes, "a size above 0, such as 11MiB")
    sized = size is not None or recorded.expert_bytes is not None
    catalogue = recorded.catalogue(expert_bytes=size if sized else 1)
    sizes = SlotSizes(catalogue)
    mean = sizes.mean_bytes if sized else None
    timed = None
    if link is not None or calibration is not None:
        disk, reads = _link(link, calibration)
        times = compute or "0ms", expert_compute or "0ms"
        timed = _timed(recorded, disk, reads, size, *times, host_memory, host_link, recall)
    else:
        given = {
            "--compute": compute,
            "--expert-compute": expert_compute,
            "--host-memory": host_memory,
            "--host-link": host_link,
            "--recall": recall,
        }
        if timeless := [option for option, value in given.items() if value is not None]:
            raise click.UsageError(f"{', '.join(timeless)} is about time: give --link or --calibration too")
    if tokens is None:
        tokens = DEFAULT_TOKENS if timed is None else DEFAULT_TIMED_TOKENS
    specs = specs_of(policies, ahead=timed is not None)
    files = artifacts_from(artifacts)
    for kind, path in files.items():
        check_taken(kind, str(path), [(spec.name, spec.options) for spec in specs])
    if timed is not None and "paths" in files:
        foretold = PathsFromFile(PathsFile.read(files["paths"]))
        foretold.check(recorded)
        timed = replace(timed, paths=foretold)
    for spec in specs:
        if timed is not None:
            check_given(files.keys(), spec.name, spec.options)
        elif policy_class(spec.name, spec.options).slot_by_slot:
            said = spelling(spec.name, spec.options)
            raise click.UsageError(f"{said} keeps nothing, so it has no hit rate without time: give --link too")
    sweep = Sweep(
        trace=recorded,
        policies=specs,
        slots=tuple(sorted({slots_of(text, sizes, sized=sized) for text in budgets})),
        concurrency=tuple(dict.fromkeys(_at_once(text) for text in concurrency)),
        tokens=tokens or None,
        timed=timed,
        belady=belady,
        expert_bytes=size if sized else 1,
        artifacts=tuple(
            artifact_of(catalogue, ARTIFACT_FILES[kind].read(path), str(path)) for kind, path in files.items()
        ),
    )
    click.echo(report.heading(trace.name, sweep, sizes.describe() if sized else None))
    count = len(sweep.places)
    with tqdm(total=count, desc="replaying", unit="cell", disable=not sys.stderr.isatty()) as bar:
        cells = sweep.cells(jobs=jobs or _worthwhile_jobs(sweep), finished=bar.update)
    click.echo("\n" + report.tables(sweep, cells, mean))
    if json_file is not None:
        json_file.write_text(json.dumps(report.as_json(trace.name, sweep, cells, mean), indent=1) + "\n")
    if plot_file is not None:
        plot(sweep, cells, plot_file, title=f"{recorded.model or trace.name}: {sweep.rows:,} tokens")


def _worthwhile_jobs(sweep: Sweep) -> int:
    """A process for each core, as long as each has more to do than to start."""
    worth_one = ROWS_WORTH_A_PROCESS if sweep.timed is None else TIMED_ROWS_WORTH_A_PROCESS
    return min(len(os.sched_getaffinity(0)), 1 + len(sweep.places) * sweep.rows // worth_one)


def _at_once(text: str) -> int | None:
    if text == "recorded":
        return None
    if not text.isdigit() or int(text) < 1:
        raise InvalidConfig("concurrent", text, "a number from 1, or `recorded`")
    return int(text)


def _link(link: str | None, pack: Path | None) -> tuple[LinkProfile, ReadSettings]:
    from greenroom.experts.copying.disk_calibration import load_or_measure
    from greenroom.experts.pack.direct_io import ReadSettings
    from greenroom.experts.pack.pack_file import PackFile
    from greenroom.replay.simulation.simulated_hardware import LinkProfile

    if link is not None:
        if pack is not None:
            raise click.UsageError("give --link or --calibration, not both")
        return LinkProfile.parse(link), ReadSettings()
    assert pack is not None
    opened = PackFile.open(pack)
    try:
        measured = load_or_measure(opened, on_measure=lambda line: click.echo(line, err=True))
    finally:
        opened.close()
    if measured is None:
        raise InvalidConfig("calibration", str(pack), "a larger pack: small ones are not measured, so give --link")
    return LinkProfile(measured.bytes_per_s, measured.latency_s), measured.reads


def _timed(
    trace: RoutingTrace,
    disk: LinkProfile,
    reads: ReadSettings,
    size: int | None,
    compute: str,
    expert_compute: str,
    host_memory: str | None,
    host_link: str | None,
    recall: float | None,
) -> TimedReplay:
    from greenroom.core.units import parse_bytes
    from greenroom.moe.routing.expert_mlp import predictors_for
    from greenroom.policies.base.slot_sizes import SlotSizes
    from greenroom.replay.simulation.simulated_hardware import LinkProfile, parse_seconds
    from greenroom.replay.simulation.timed_replay import ComputeProfile, TimedReplay

    if size is None and trace.expert_bytes is None:
        raise InvalidConfig("expert-bytes", None, "a size such as 11MiB, as this trace does not say it")
    if (host_memory is None) != (host_link is None):
        raise click.UsageError("--host-memory and --host-link go together")
    sizes = SlotSizes(trace.catalogue(expert_bytes=size))
    host = 0 if host_memory is None else parse_bytes(host_memory, field="host-memory", whole=sizes.all_bytes)
    return TimedReplay(
        trace=trace,
        expert_bytes=size,
        disk=disk,
        reads=reads,
        upload=None if host_link is None else LinkProfile.parse(host_link, field="host-link"),
        compute=ComputeProfile(
            layer_s=parse_seconds(compute, field="compute"),
            expert_s=parse_seconds(expert_compute, field="expert-compute"),
        ),
        host_slots=sizes.host_slots(host),
        recall=recall,
        predictors=predictors_for,
    )
