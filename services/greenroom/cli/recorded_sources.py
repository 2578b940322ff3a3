"""Options of commands that make something of many sequences' routing: from prompts that are run, or from traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from greenroom.cli.model_options import model_options, worker_config
from greenroom.cli.option_stack import stack
from greenroom.cli.prompts import read_prompts

if TYPE_CHECKING:
    from greenroom.cli.recording import Asked
    from greenroom.core.artifacts.artifact_file import ArtifactFile
    from greenroom.replay import RoutingTrace
    from greenroom.worker.model.model_runtime import ModelRuntime

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_MODEL = click.argument("named", metavar="[MODEL]", required=False)
_PROMPTS = click.option(
    "--prompts",
    "file",
    type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path),
    help="Run these prompts, like those to come: one a line, text or JSON with `prompt` or `messages`; - is stdin.",
)
_TRACE = click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Take recorded routing instead, an .npz of `greenroom trace`; may be given several times.",
)
_RUNNING = (
    click.option("--max-tokens", default=128, show_default=True, help="Most tokens of an answer, with --prompts."),
    click.option("--concurrency", default=8, show_default=True, help="Sequences at once, with --prompts."),
    click.option("--raw", is_flag=True, help="Complete the text as it is, without the chat template."),
)


def source_options(command: F) -> F:
    """All of them, and the model's."""
    return stack(_MODEL, _PROMPTS, _TRACE, *_RUNNING)(model_options(command))


def prompt_options(command: F) -> F:
    """Those of commands that can only run prompts, and the model's."""
    return stack(_MODEL, _PROMPTS, *_RUNNING)(model_options(command))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Of one model, whose name it is, or ""."""

    traces: list[RoutingTrace]
    model: str
    experts_per_layer: tuple[int, ...]


def check_source(options: dict[str, Any], out: Path) -> None:
    """What can be refused before anything is run. Raises click.UsageError, click.BadParameter."""
    named, model = options["named"], options["model"]
    if named is not None and model not in (None, named):
        raise click.UsageError(f"MODEL is {named}, and --model is {model}: give one of them")
    if "traces" not in options:
        if options["file"] is None:
            raise click.UsageError("give --prompts, to run them: recorded routing does not hold what is learnt from")
    elif (options["file"] is None) == (not options["traces"]):
        raise click.UsageError("give either --prompts, to run them, or --trace, of routing that was recorded")
    if not out.parent.is_dir():
        raise click.BadParameter(f"there is no folder {out.parent}", param_hint="--out")


def recorded_of(options: dict[str, Any], *, tokens: bool = False) -> Recorded:
    """Takes the options of ``source_options``; runs the prompts, with a progress bar. ``tokens``: of files, read those
    that stand beside them too. Raises InvalidConfig, InvalidRequest, TraceError, click.UsageError."""
    from greenroom.core.errors import InvalidConfig
    from greenroom.replay import RoutingTrace

    paths, model = options.pop("traces"), options["named"] or options["model"]
    traces = [RoutingTrace.load(path, tokens=tokens) for path in paths] if paths else [run_prompts(options, _recorded)]
    shapes = [tuple(one.experts_per_layer.tolist()) for one in traces]
    if len(set(shapes)) > 1:
        raise InvalidConfig("trace", " and ".join(f"{len(one)} layers" for one in shapes), "traces of one model")
    names = {one.model for one in traces if one.model}
    return Recorded(traces, names.pop() if len(names) == 1 else model or "", shapes[0])


def write_artifact(made: ArtifactFile, out: Path) -> None:
    """Raises InvalidConfig where it can not be written."""
    from greenroom.core.errors import InvalidConfig

    try:
        made.write(out)
    except OSError as error:
        raise InvalidConfig("out", str(out), f"it must be a place that can be written: {error.strerror}") from error


def run_prompts(options: dict[str, Any], run: Callable[[ModelRuntime, Sequence[Asked]], T]) -> T:
    """What ``run`` makes of the model and what is asked of it. Takes the options of ``prompt_options``. Raises
    InvalidConfig, InvalidRequest, click.UsageError."""
    file, named = options.pop("file"), options.pop("named")
    options["model"] = named or options["model"]
    max_tokens, options["max_running"] = options.pop("max_tokens"), options.pop("concurrency")
    raw = options.pop("raw")
    prompts = read_prompts(file)
    if not prompts:
        raise click.UsageError("no prompts in the file")
    config = worker_config(options)

    # torch takes seconds: what can be refused without it, was.
    from greenroom.cli.recording import requests_of
    from greenroom.core.generation import SamplingParams
    from greenroom.worker.model.model_runtime import ModelRuntime

    with ModelRuntime(config) as worker:
        click.echo(worker.describe(), err=True)
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        asked = requests_of(worker, prompts, sampling, raw=raw, system=None, skip_too_long=True)
        return run(worker, asked)


def _recorded(worker: ModelRuntime, asked: Sequence[Asked]) -> RoutingTrace:
    from greenroom.cli.recording import record

    trace, _ = record(worker, asked)
    return trace
