"""Of which data set each of the real prompts is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click
import msgspec

from greenroom.tasktype.evaluate import LabelledPrompt

_BY_SOURCE: Final[Mapping[str, str]] = {
    "FastChat/vicuna_bench": "vicuna",
    "Spec-Bench": "mt_bench",
    "self-instruct/user_oriented": "user_oriented",
}
_DATA_SETS: Final = (
    "adversarial_qa", "ag_news", "amazon_polarity", "app_reviews", "cnn_dailymail", "commonsense_qa", "cosmos_qa",
    "dbpedia_14", "dream", "duorc", "gigaword", "glue_mrpc", "glue_qqp", "imdb", "kilt_tasks_hotpotqa", "multi_news",
    "paws_labeled_final", "qasc", "quarel", "quartz", "quoref", "ropes", "rotten_tomatoes", "samsum", "sciq",
    "social_i_qa", "trec", "wiki_hop_original", "wiki_qa", "wiqa", "xsum", "yelp_review_full",
)  # fmt: skip
"""With these the names of P3's templates begin."""


class _Line(msgspec.Struct):
    prompt: str
    task_type: str
    source: str
    source_task: str


def read_prompts(path: Path) -> list[LabelledPrompt]:
    """The lines of `prompts/task-types.jsonl`, each with its template as wording and its data set as origin.

    Raises click.ClickException where a line is not of such a file.
    """
    try:
        lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line.strip()]
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{path} is no file of prompts with their source: {error}") from error
    return [LabelledPrompt(one.prompt, one.task_type, one.source_task, origin_of(one)) for one in lines]


def origin_of(line: _Line) -> str:
    if line.source in _BY_SOURCE:
        return _BY_SOURCE[line.source]
    for name in _DATA_SETS:
        if line.source_task.startswith(name):
            return name
    raise click.ClickException(f"it is not known of which data set {line.source_task!r} ({line.source}) is")
