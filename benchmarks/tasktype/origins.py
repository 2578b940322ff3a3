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

_FAMILIES: Final[Mapping[str, str]] = {
    "amazon_polarity": "reviews", "app_reviews": "reviews", "imdb": "reviews", "rotten_tomatoes": "reviews",
    "yelp_review_full": "reviews", "ag_news": "topics", "dbpedia_14": "topics", "glue_mrpc": "glue", "glue_qqp": "glue",
    "cnn_dailymail": "news", "multi_news": "news", "mt_bench": "chat", "vicuna": "chat",
}  # fmt: skip
"""Data sets whose templates word the wish alike. Every other is a family by itself."""


class _Line(msgspec.Struct):
    prompt: str
    task_type: str
    source: str
    source_task: str


def read_prompts(path: Path, *, families: bool = False) -> list[LabelledPrompt]:
    """The lines of `prompts/task-types.jsonl`, each with its template as wording and its data set as origin, or the
    family of that.

    Raises click.ClickException where a line is not of such a file.
    """
    try:
        lines = [msgspec.json.decode(line, type=_Line) for line in path.read_bytes().splitlines() if line.strip()]
    except msgspec.MsgspecError as error:
        raise click.ClickException(f"{path} is no file of prompts with their source: {error}") from error
    origins = [_origin_of(one) for one in lines]
    if families:
        origins = [_FAMILIES.get(origin, origin) for origin in origins]
    return [
        LabelledPrompt(one.prompt, one.task_type, one.source_task, origin)
        for one, origin in zip(lines, origins, strict=True)
    ]


def _origin_of(line: _Line) -> str:
    if line.source in _BY_SOURCE:
        return _BY_SOURCE[line.source]
    for name in _DATA_SETS:
        if line.source_task.startswith(name):
            return name
    raise click.ClickException(f"it is not known of which data set {line.source_task!r} ({line.source}) is")
