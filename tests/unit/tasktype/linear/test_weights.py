"""The file of weights: what it may say, and how it is told what is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype import UNKNOWN
from greenroom.tasktype.linear import InstructionFeatures, LinearExtractor, load_weights, parse_weights
from greenroom.tasktype.linear.weights import MAX_FILE_BYTES, dump_weights

FILE: dict[str, Any] = {
    "format": "greenroom-task-weights",
    "version": 1,
    "features": "instruction-1",
    "task_types": ["summarise", "question"],
    "temperature": 1.0,
    "least_probability": 0.6,
    "scale": 0.01,
    "bias": [0.0, 0.0],
    "weights": {"f summary": [900, -900], "f who": [-900, 900], "l who": [-900, 900]},
    "card": {"about": "made up"},
}


def changed(**fields: Any) -> bytes:
    return json.dumps({**FILE, **fields}).encode()


def made(data: bytes) -> LinearExtractor:
    return LinearExtractor(parse_weights(data, "test"), InstructionFeatures())


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "must be a file of weights"),
        (b"\xff\xfe", "must be a file of weights"),
        (b"[" * 100_000, "must be a file of weights"),
        (b'{"format": "greenroom-task-keywords", "version": 1}', "format"),
        (changed(version=2), r"\$.version"),
        (changed(more=1), "more"),
        (changed(task_types=["a"]), r"\$.task_types"),
        (changed(task_types=["a", "a"]), r"\$.task_types\[1\].*once"),
        (changed(task_types=["a", "unknown"]), r"\$.task_types\[1\].*ask for nothing.*behind two types"),
        (changed(task_types=["a", "unknown", "b"], bias=[0, 0, 0]), r"\$.task_types\[1\].*ask for nothing, last"),
        (changed(task_types=["a", "x" * 65]), r"\$.task_types\[1\]"),
        (changed(temperature=0), r"\$.temperature"),
        (changed(least_probability=1), r"\$.least_probability"),
        (changed(scale=-1.0), r"\$.scale"),
        (changed(bias=[0.0]), r"\$.bias"),
        (changed(bias=[0.0, 1e9]), r"\$.bias\[1\]"),
        (changed(weights={}), r"\$.weights"),
        (changed(weights={"f a": [1]}), r"\$.weights\['f a'\].*2 columns"),
        (changed(weights={"f a": [1, 40_000]}), r"\$.weights\["),
        (changed(weights={"f a": [1, 0.5]}), r"\$.weights\["),
    ],
)
def test_what_is_wrong_is_told_with_its_place(data: bytes, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said) as caught:
        parse_weights(data, "mine.json")
    assert "mine.json" in str(caught.value)


def test_weights_for_other_features_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"features.*instruction-0.*instruction-1"):
        made(changed(features="instruction-0"))


def test_files_that_can_not_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.json"):
        load_weights(tmp_path / "absent.json")
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(InvalidConfig, match=str(MAX_FILE_BYTES)):
        load_weights(large)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    weights = parse_weights(changed(), "test")
    path = tmp_path / "weights.json"
    path.write_bytes(dump_weights(weights))
    assert load_weights(path) == weights
    assert b'\n  "f summary": [900,-900],\n' in path.read_bytes()


def test_the_weights_decide() -> None:
    extractor = made(changed())
    assert extractor.extract("a summary of the text").task_type == "summarise"
    asked = extractor.extract("who did that to them")
    assert asked.task_type == "question"
    assert asked.scores["question"] > 0.6 > asked.scores["summarise"]
    assert extractor.extract("the weather is fine").task_type == UNKNOWN


def test_below_the_least_probability_nothing_is_said() -> None:
    prompt = "a summary of the text"
    sure = made(changed()).extract(prompt)
    hot = made(changed(temperature=20.0)).extract(prompt)
    assert hot.task_type == UNKNOWN
    assert 0.5 < hot.scores["summarise"] < 0.6 < sure.scores["summarise"]


def test_a_column_for_texts_that_ask_for_nothing() -> None:
    """What is sure is the wish beside no wish: two types that are alike do not make it doubtful."""
    weights = {"f summary": [900, -900, -900], "f who": [-900, 900, -900], "f weather": [-100, -100, 900]}
    both = changed(task_types=["summarise", "question", "unknown"], bias=[0, 0, 0], weights=weights)
    extractor = made(both)
    assert extractor.names == ("summarise", "question")
    assert extractor.extract("a summary of the text").task_type == "summarise"
    silent = extractor.extract("the weather is fine")
    assert (silent.task_type, set(silent.scores)) == (UNKNOWN, {"summarise", "question"})
    assert extractor.extract("").task_type == UNKNOWN, "each is alike probable: 0.5 beside nothing"
    torn = changed(task_types=["summarise", "question", "unknown"], bias=[0, 0, -3], weights=weights)
    told = made(torn).extract("nothing that is known")
    assert told.task_type == "summarise"
    assert max(told.scores.values()) < 0.6


def test_the_shipped_file_has_its_card_and_is_small() -> None:
    weights = load_weights()
    assert {"about", "licence", "prompts_by_origin", "task_accuracy_unseen", "seed"} <= set(weights.card)
    assert all(weights.card[field] for field in ("about", "licence"))
    assert len(dump_weights(weights)) <= 3_000_000
