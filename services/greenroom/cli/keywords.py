"""``greenroom keywords``: files of keywords for ``greenroom tasktype``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from greenroom.cli.numbers import SEED, NumberRange
from greenroom.core.errors import InvalidConfig
from greenroom.core.files import write_whole


@click.group()
def keywords() -> None:
    """Keywords by task type, from which `greenroom tasktype` tells what kind of task a prompt describes.

    \b
    Examples:
      greenroom keywords learn labelled.jsonl --output mine.json
      greenroom tasktype --keywords mine.json
    """


@keywords.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file of keywords to write."
)
@click.option(
    "--wording-field",
    default="wording",
    show_default=True,
    help="The field that says who or what worded a prompt; prompts of one are kept together.",
)
@click.option("--start", help="Keywords to begin with: a file, or `shipped` for those that come with greenroom.")
@click.option(
    "--held-out",
    type=NumberRange(0, 0.9),
    default=0.2,
    show_default=True,
    help="Share of the prompts that nothing is learnt from.",
)
@click.option(
    "--most-keywords", type=click.IntRange(min=1), default=400, show_default=True, help="Of all types together."
)
@click.option("--seed", type=SEED, default=0, show_default=True, help="Which prompts are held out.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw the confusion of types: .png, .svg or .pdf."
)
def learn(
    file: Path,
    output: Path,
    wording_field: str,
    start: str | None,
    held_out: float,
    most_keywords: int,
    seed: int,
    plot: Path | None,
) -> None:
    """Learn keywords from labelled prompts: FILE has {"prompt": ..., "task_type": ...} a line.

    Prints as JSON how well they tell the prompts apart that nothing was learnt from, beside the keywords that come
    with greenroom. Where many prompts are made from one pattern, say with --wording-field which belong together: else
    the figures are those of patterns that were seen.

    \b
    Examples:
      greenroom keywords learn labelled.jsonl --output mine.json
      greenroom keywords learn labelled.jsonl --output mine.json --wording-field source --plot confusion.png
      greenroom keywords learn labelled.jsonl --output mine.json --start shipped
    """
    from greenroom.core.pictures import check_plot
    from greenroom.tasktype.confusion_plot import draw_confusion
    from greenroom.tasktype.evaluate import evaluate, read_labelled
    from greenroom.tasktype.keywords import KeywordExtractor, load_profile
    from greenroom.tasktype.keywords.learn import LearnConfig, learn_keywords
    from greenroom.tasktype.keywords.profile import dump_profile

    for option, path in (("output", output), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise InvalidConfig(option, str(path), "a file in a folder that exists")
    if plot is not None:
        check_plot(plot)
    begin = None if start is None else load_profile(None if start == "shipped" else Path(start))
    config = LearnConfig(held_out=held_out, most_keywords=most_keywords)
    learnt = learn_keywords(list(read_labelled(file, wording=wording_field)), seed=seed, start=begin, config=config)
    report: dict[str, Any] = {
        "keywords": {task.name: len(task.keywords) for task in learnt.profile.task_types},
        "trained_on": learnt.train.report(),
    }
    if learnt.held_out.prompts:
        report["held_out"] = learnt.held_out.report()
        report["shipped_on_held_out"] = evaluate(KeywordExtractor(load_profile()), learnt.held_out_prompts).report()
    _write(output, dump_profile(learnt.profile))
    if plot is not None:
        draw_confusion(learnt.held_out if learnt.held_out.prompts else learnt.train, plot)
    click.echo(json.dumps(report, indent=2, ensure_ascii=False))


def _write(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as error:
        raise InvalidConfig("output", str(path), f"a file that can be written: {error.strerror}") from error
