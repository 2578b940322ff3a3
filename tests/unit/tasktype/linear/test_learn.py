"""Weights that are learnt: from several origins, for those that were not seen."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype import UNKNOWN
from greenroom.tasktype.evaluate import LabelledPrompt, read_labelled
from greenroom.tasktype.linear import InstructionFeatures, LinearExtractor
from greenroom.tasktype.linear.learn import LearnConfig, learn_weights, origins_of
from greenroom.tasktype.linear.wordings import texts_without_a_wish, worded_prompts

FEATURES = InstructionFeatures()
SMALL = LearnConfig(worded=0, rounds=30)
TEXTS = list(texts_without_a_wish())
WISHES = {
    "haiku": ("Write a haiku about this: {}", "{}\nNow as a haiku, please.", "Turn it into a haiku. {}"),
    "sums": ("Add up the figures here. {}", "What do these figures add up to? {}", "{}\nAdd up the figures."),
}


def made(origins: int = 4, each: int = 6) -> list[LabelledPrompt]:
    random = Random(5)
    return [
        LabelledPrompt(wish.format(random.choice(TEXTS)), task_type, wish, f"origin {origin}")
        for origin in range(origins)
        for task_type, wishes in WISHES.items()
        for wish in wishes
        for _ in range(each)
    ]


def test_wishes_of_origins_that_were_not_seen_are_told() -> None:
    learnt = learn_weights(made(), FEATURES, config=SMALL)
    assert set(learnt.left_out.accuracy) == {f"origin {number}" for number in range(4)}
    assert learnt.left_out.mean >= 0.95
    extractor = LinearExtractor(learnt.weights, FEATURES)
    assert extractor.extract("Make a haiku of the following: it rained all day.").task_type == "haiku"
    assert extractor.extract("Please add up the figures below: 3, 4").task_type == "sums"
    assert extractor.extract("").task_type == UNKNOWN


def test_texts_that_ask_for_nothing_have_a_column_where_there_are_any() -> None:
    """Long prompts give such texts: cut anywhere, and whole sentences."""
    long = "The ship left at dawn. Nobody was on the quay. Rain fell on the empty harbour, as it had all week. " * 10
    prompts = [
        LabelledPrompt(wish.format(long[place:]), task_type, wish, f"origin {origin}")
        for origin in range(3)
        for task_type, wishes in WISHES.items()
        for place, wish in enumerate(wishes)
    ]
    learnt = learn_weights(prompts, FEATURES, config=SMALL)
    assert learnt.weights.task_types == ("haiku", "sums", UNKNOWN)
    assert learnt.weights.names == ("haiku", "sums")
    assert learnt.left_out.quiet == 1.0
    extractor = LinearExtractor(learnt.weights, FEATURES)
    assert extractor.extract("Rain fell on the empty harbour. The ship left at dawn.").task_type == UNKNOWN
    assert extractor.extract(f"Write a haiku about this: {TEXTS[0]}").task_type == "haiku"
    quiet = {name for name, steps in learnt.weights.weights.items() if steps[2] > 0}
    assert "f the ship" in quiet or "f rain" in quiet
    assert learn_weights(made(2, 2), FEATURES, config=SMALL).weights.task_types == ("haiku", "sums")


def test_the_same_prompts_in_any_order_give_the_same_weights() -> None:
    prompts = made(origins=2, each=3)
    other = list(prompts)
    Random(1).shuffle(other)
    assert (
        learn_weights(prompts, FEATURES, config=SMALL).weights == learn_weights(other, FEATURES, config=SMALL).weights
    )


def test_labels_that_mean_nothing_are_not_told_of_left_out_origins() -> None:
    """Would be, if what is left out were learnt from."""
    random = Random(2)
    prompts = [
        LabelledPrompt(f"{text} {number}", random.choice(["a", "b"]), origin=f"origin {number % 4}")
        for number, text in enumerate(TEXTS * 3)
    ]
    learnt = learn_weights(
        prompts, FEATURES, config=LearnConfig(worded=0, rounds=30, without_a_wish=0.0, most_lost=1.0)
    )
    assert learnt.left_out.mean <= 0.7


def test_as_many_features_are_kept_as_may_be() -> None:
    learnt = learn_weights(made(2, 2), FEATURES, config=LearnConfig(worded=0, rounds=10, most_features=50))
    assert len(learnt.weights.weights) == 50


def test_each_fit_is_told() -> None:
    told: list[None] = []
    prompts = made(origins=3, each=2)
    learn_weights(prompts, FEATURES, config=SMALL, done=lambda: told.append(None))
    assert len(told) == origins_of(prompts) == 3


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "two task types"),
        ([LabelledPrompt("x", "a", origin="o"), LabelledPrompt("y", "a", origin="p")], "two task types"),
        ([LabelledPrompt("x", "a", origin="o"), LabelledPrompt("y", UNKNOWN, origin="p")], "unknown"),
        ([LabelledPrompt("x", "a", origin="o"), LabelledPrompt("y", "b", origin="o")], "two origins"),
        ([LabelledPrompt("x", "a", origin="o"), LabelledPrompt("y", "b", origin="greenroom")], "come with greenroom"),
    ],
)
def test_what_can_not_be_learnt_from_is_refused(prompts: list[LabelledPrompt], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        learn_weights(prompts, FEATURES, config=SMALL)


def test_the_wordings_that_come_along_are_filled() -> None:
    prompts = worded_prompts(2, seed=0)
    assert {one.task_type for one in prompts} == {"summarise", "classify", "compare", "question", "converse"}
    assert not [one.prompt for one in prompts if "{a" in one.prompt or "{t" in one.prompt]
    assert worded_prompts(2, seed=0) == prompts != worded_prompts(2, seed=1)


def test_the_origin_is_read_from_its_field(tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text(json.dumps({"prompt": "x", "task_type": "a", "client": 7, "wording": None}))
    assert list(read_labelled(path, origin="client")) == [LabelledPrompt("x", "a", "", "7")]
