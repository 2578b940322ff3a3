"""``greenroom task-weights``: files of weights for ``greenroom tasktype``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from greenroom.cli.numbers import SEED
from greenroom.core.errors import InvalidConfig
from greenroom.core.files import write_whole


def _advance(bar: tqdm[Any]) -> None:
    bar.update()


@click.group("task-weights")
def task_weights() -> None:
    """Weights of the linear head by which `greenroom tasktype` tells what kind of task a prompt describes.

    \b
    Examples:
      greenroom task-weights learn labelled.jsonl --output mine.json
      greenroom tasktype --weights mine.json
    """


@task_weights.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The file of weights to write."
)
@click.option(
    "--wording-field",
    default="wording",
    show_default=True,
    help="The field that says who or what worded a prompt; few prompts of one are learnt from.",
)
@click.option(
    "--origin-field",
    default="origin",
    show_default=True,
    help="The field that says of which data set a prompt is; each is left out once, to measure and to calibrate.",
)
@click.option(
    "--features",
    type=click.Choice(("instruction", "embedding")),
    default="instruction",
    show_default=True,
    help="What is weighed: for the extractor linear, or a sentence embedding besides, for embedding.",
)
@click.option("--about", default="", help="Where the prompts come from, for the card in the file.")
@click.option("--licence", default="", help="The prompts' licence, for the card.")
@click.option("--seed", type=SEED, default=0, show_default=True, help="Which prompts of a wording are learnt from.")
def learn(
    file: Path,
    output: Path,
    wording_field: str,
    origin_field: str,
    features: str,
    about: str,
    licence: str,
    seed: int,
) -> None:
    """Learn weights from labelled prompts: FILE has {"prompt": ..., "task_type": ..., "origin": ...} a line.

    Prints as JSON how well origins are told that nothing was learnt from. Wordings that come with greenroom are learnt
    from as well, of the types that FILE has. The same prompts and seed give the same file.

    \b
    Examples:
      greenroom task-weights learn labelled.jsonl --output mine.json
      greenroom task-weights learn labelled.jsonl --output mine.json --origin-field client --wording-field template
    """
    from greenroom.tasktype.embedding import EmbeddingFeatures
    from greenroom.tasktype.evaluate import read_labelled
    from greenroom.tasktype.linear import InstructionFeatures
    from greenroom.tasktype.linear.learn import learn_weights, origins_of
    from greenroom.tasktype.linear.weights import dump_weights

    if not output.parent.is_dir():
        raise InvalidConfig("output", str(output), "a file in a folder that exists")
    seen = InstructionFeatures() if features == "instruction" else EmbeddingFeatures()
    prompts = list(read_labelled(file, wording=wording_field, origin=origin_field))
    card = {"about": about, "licence": licence}
    with tqdm(total=origins_of(prompts), desc="origins left out", disable=not sys.stderr.isatty()) as bar:
        learnt = learn_weights(prompts, seen, seed=seed, card=card, done=lambda: _advance(bar))
    try:
        write_whole(output, dump_weights(learnt.weights))
    except OSError as error:
        raise InvalidConfig("output", str(output), f"a file that can be written: {error.strerror}") from error
    report = {
        "features": len(learnt.weights.weights),
        "temperature": learnt.weights.temperature,
        "least_probability": learnt.weights.least_probability,
        "left_out": {
            "task_accuracy_unseen": round(learnt.left_out.mean, 4),
            "by_origin": {origin: round(share, 4) for origin, share in learnt.left_out.accuracy.items()},
            "unknown": round(learnt.left_out.unknown, 4),
            "unknown_of_texts_without_a_wish": round(learnt.left_out.quiet, 4),
        },
    }
    click.echo(json.dumps(report, indent=2, ensure_ascii=False))
