"""``greenroom profile``: what a model is like, by task type; one file that the services load."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom import __version__
from greenroom.cli.model_options import checkpoint_options, runtime_options, worker_config
from greenroom.cli.numbers import SEED
from greenroom.cli.option_stack import F
from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS

if TYPE_CHECKING:
    from greenroom.profiling.config import ProfileConfig
    from greenroom.profiling.prompts import TaskPrompts
    from greenroom.worker.model.config import WorkerConfig

_OWN = (
    "policy",
    "policy_options",
    "fidelity",
    "profile",
    "warm_start",
    "max_waiting",
    "batching",
    "residual",
    *POLICY_ARTIFACTS,
)
"""Options of a worker that a profile sets itself."""

LABELLED_PER_TASK, LABELLED_QUICKLY = 400, 60
"""Prompts of each of the bundled model's tasks that keywords are learnt from."""


def _without_own(command: F) -> F:
    """The options of a worker, less those."""
    parameters: list[click.Option] = getattr(command, "__click_params__", [])
    parameters[:] = [one for one in parameters if one.name not in _OWN]
    return command


@click.command()
@click.argument("model", required=False)
@click.option(
    "--tasks",
    "file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='Prompts, JSON Lines: {"prompt": ..., "task_type": ..., "answer": ...}, the answer where there is one.  '
    "[default: the bundled model's own tasks, for it and what was widened from it]",
)
@click.option(
    "--trace",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Observe this recorded routing instead, an .npz of `greenroom trace`; no model is run.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="The folder to write; what an earlier profile there has beyond this one's stages is kept.  "
    "[default: ./profile-NAME]",
)
@click.option(
    "--stages",
    default="all",
    show_default=True,
    help="Some of lengths,sensitivity,worth,reuse,costs,keywords,observations. A new profile always has lengths.",
)
@click.option("--prompts-per-task", type=int, help="Prompts of each task that are run.  [default: 40]")
@click.option("--seeds", type=int, default=3, show_default=True, help="Repeats of what is random, at least 3.")
@click.option(
    "--worth-prompts",
    type=int,
    default=12,
    show_default=True,
    help="Prompts of each task that are run without an expert, for each expert (as many turns as experts times this).",
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="What all of them follow from.")
@click.option(
    "--threshold",
    type=float,
    default=0.85,
    show_default=True,
    help="Similarity to the undisturbed answers from which on a layer counts as insensitive.",
)
@click.option(
    "--kept", "share", type=float, default=0.6, show_default=True, help="Share of the experts whose reuse is measured."
)
@click.option("--max-tokens", type=int, default=256, show_default=True, help="Most tokens of an answer.")
@click.option(
    "--similarity",
    default="embedding",
    show_default=True,
    help="How answers are compared: embedding (of sentences), or tokens (words in common).",
)
@click.option("--plots/--no-plots", default=True, show_default=True, help="Draw pictures of what was measured.")
@click.option("--quick", is_flag=True, help="A first look: few prompts, few repeats of costs.")
@_without_own
@checkpoint_options
@runtime_options
def profile(
    model: str | None,
    file: Path | None,
    trace: Path | None,
    output: Path | None,
    stages: str,
    prompts_per_task: int | None,
    seeds: int,
    worth_prompts: int,
    seed: int,
    threshold: float,
    share: float,
    max_tokens: int,
    similarity: str,
    plots: bool,
    quick: bool,
    **options: Any,
) -> None:
    """Measure MODEL by task type: how long answers get, which experts tasks use, which layers they are sensitive in,
    how long experts can be kept, and what tokens and loads cost here.

    Writes a folder with profile.json, for --profile of serve, worker and scheduler; keywords.json, for --keywords;
    routing.npz, for `greenroom replay`, with what is to be observed in it; and pictures. It appears whole, at the end.
    Costs are those of this machine, all else is the same wherever it is measured. docs/architecture/profiles.md

    \b
    Examples:
      greenroom profile --quick                                    the bundled model, in about a minute
      greenroom profile ./checkpoint --tasks prompts.jsonl --output ./profile
      greenroom profile ./checkpoint --tasks prompts.jsonl --output ./profile --stages costs
      greenroom profile --trace routing.npz --output ./observed
      greenroom serve --model ./checkpoint --policy emoe --profile ./profile/profile.json
    """
    from dataclasses import replace

    from greenroom.core.pictures import check_drawing
    from greenroom.profiling.config import ProfileConfig, stages_of
    from greenroom.profiling.folder import check_folder

    config = ProfileConfig(
        stages=stages_of(stages),
        seeds=seeds,
        worth_prompts=worth_prompts,
        seed=seed,
        threshold=threshold,
        share=share,
        max_tokens=max_tokens,
        similarity=similarity,
    )
    if quick:
        config = config.quick()
    if prompts_per_task is not None:
        config = replace(config, prompts_per_task=prompts_per_task)
    if trace is not None:
        _observe(trace, output or Path(f"profile-{trace.stem}"), model=model, file=file, plots=plots, seed=seed)
        return
    worker = _worker_config(model, options)
    folder = output or Path(f"profile-{worker.served_model_name or Path(worker.model).name}")
    check_folder(folder)
    if plots:
        check_drawing()
    if config.needs_similarity:
        from greenroom.profiling.measures.similarity import check_similarity

        check_similarity(config.similarity)
    prompts = _prompts(worker, file, config, LABELLED_QUICKLY if quick else LABELLED_PER_TASK)

    # torch takes seconds: what can be refused without it, was.
    from greenroom.profiling.command import measure

    shown = sys.stderr.isatty() if worker.progress is None else worker.progress
    made_by = {"command": shlex.join(["greenroom", *sys.argv[1:]]), "greenroom": __version__}
    click.echo(measure(worker, prompts, config, folder, made_by, plots=plots, progress=shown, say=_say))


def _observe(trace: Path, folder: Path, *, model: str | None, file: Path | None, plots: bool, seed: int) -> None:
    from greenroom.core.pictures import check_drawing
    from greenroom.profiling.folder import check_folder

    if model is not None or file is not None:
        raise click.UsageError("--trace is recorded already: it goes with neither MODEL nor --tasks")
    check_folder(folder)
    if plots:
        check_drawing()
    from greenroom.profiling.command import observe_trace

    click.echo(observe_trace(trace, folder, plots=plots, seed=seed))


def _say(line: str) -> None:
    click.echo(line, err=True)


def _worker_config(model: str | None, options: dict[str, Any]) -> WorkerConfig:
    from dataclasses import replace

    config = worker_config({"model": model, "policy_options": "{}", **options})
    folder = Path(config.model)
    name = config.served_model_name or (folder.resolve().name if folder.is_dir() else None)
    # The policy that measures keeps victims as next-use does, so memory is planned for that one.
    return replace(config, served_model_name=name, warm_start=False, profile=None, policy="next-use", policy_options={})


def _prompts(worker: WorkerConfig, file: Path | None, config: ProfileConfig, labelled: int) -> TaskPrompts:
    """Raises click.UsageError where there are none."""
    from greenroom.profiling.prompts import has_bundled_tasks, of_bundled_tasks, of_file

    if file is not None:
        return of_file(file, config.prompts_per_task)
    if not has_bundled_tasks(Path(worker.model)):
        raise click.UsageError(
            "--tasks is needed: a file of prompts with their task types, such as this model will be asked (only the "
            "bundled model has tasks of its own)"
        )
    return of_bundled_tasks(config.prompts_per_task, seed=config.seed, labelled_per_task=labelled)
