"""The generator: seeded, split by content, with answers that follow from the prompts."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

import pytest

from greenroom.core.errors import UnknownName
from greenroom.demo.tasks import TASKS, Sample, sample, samples, split_of
from greenroom.demo.wording import words

_MANY = 400


def _all(split: str = "heldout", count: int = _MANY) -> list[Sample]:
    return [one for task in TASKS for one in samples(task, count, seed=3, split=split)]  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_samples_whatever_was_drawn_before(task: str) -> None:
    first = list(samples(task, 20, seed=5))
    assert first[13] == sample(task, seed=5, index=13)
    assert first == list(samples(task, 20, seed=5))
    assert first != list(samples(task, 20, seed=6))


def test_the_same_in_another_process() -> None:
    code = "from greenroom.demo.tasks import *; print([sample(t, seed=9, index=4).prompt for t in TASKS])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == str([sample(task, seed=9, index=4).prompt for task in TASKS])


@pytest.mark.parametrize("task", TASKS)
def test_no_heldout_content_is_ever_trained_on(task: str) -> None:
    heldout = {one.key for one in samples(task, _MANY, seed=1, split="heldout")}
    train = {one.key for one in samples(task, 4 * _MANY, seed=2, split="train")}
    assert not heldout & train
    assert all(split_of(task, key) == "heldout" for key in heldout)
    assert all(split_of(task, key) == "train" for key in train)


@pytest.mark.parametrize("task", TASKS)
def test_samples_vary(task: str) -> None:
    drawn = list(samples(task, _MANY, seed=1))
    assert len({one.prompt for one in drawn}) > 0.95 * _MANY
    assert len({one.kind for one in drawn}) >= 2
    assert len({len(one.prompt.split()) for one in drawn}) >= 12


def test_answers_differ_in_length_by_task() -> None:
    words_by_task = {task: sum(len(one.answer.split()) for one in samples(task, 200)) / 200 for task in TASKS}
    assert words_by_task["classify"] == 1
    assert 3 <= words_by_task["question"] <= 7
    assert 5 <= words_by_task["compare"] <= 8
    assert 10 <= words_by_task["summarise"] < words_by_task["converse"] + 10


def test_facts_are_told_in_the_prompt() -> None:
    for one in _all():
        for name, value in one.facts.items():
            if name == "rule":
                continue
            parts = value.split() if one.kind == "sentiment" else [value]
            assert all(part.lower() in one.prompt.lower() for part in parts), (one, name)


def test_sentiment_follows_from_the_words() -> None:
    seen: Counter[str] = Counter()
    for one in samples("classify", _MANY, seed=3):
        if one.kind != "sentiment":
            continue
        signs = set()
        for thing, negation, adjective in re.findall(
            r"[Tt]he (\w+) was (not at all |not |never |hardly )?(?:(?:really|very|quite|simply|truly|rather) )?(\w+)",
            one.prompt,
        ):
            assert thing in words.REVIEWED
            assert (adjective in words.GOOD) != (adjective in words.BAD)
            signs.add((adjective in words.GOOD) != bool(negation))
        assert one.answer == ("mixed" if len(signs) == 2 else "positive" if signs == {True} else "negative")
        seen[one.answer] += 1
    assert min(seen.values()) > 50


def test_topics_do_not_share_their_words() -> None:
    for column in range(3):
        listed = [word for parts in words.TOPICS.values() for word in parts[column]]
        assert len(listed) == len(set(listed))
    for one in samples("classify", _MANY, seed=3):
        if one.kind == "topic":
            assert one.facts["who"] in words.TOPICS[one.answer][0]


def test_questions_have_one_answer_which_the_passage_tells() -> None:
    for one in samples("question", _MANY, seed=3):
        asked = [name for name in one.facts if one.facts[name] in one.answer and name.split(".")[0] in one.answer]
        assert len(asked) >= 1
        name, attribute = asked[0].split(".")
        assert attribute == one.kind
        rivals = [key for key in one.facts if key.endswith(f".{attribute}")]
        assert len(rivals) >= 2
        telling = [s for s in re.split(r"(?<=[.?:]) ", one.prompt) if name in s and one.facts[asked[0]] in s]
        assert len(telling) == 1


_ORDER = {
    "size": ["tiny", "small", "large", "huge"],
    "speed": ["sluggish", "slow", "quick", "rapid"],
}
_NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine"]
_LESS = {"smaller", "slower", "cheaper", "younger", "lighter"}
_MORE = {"larger", "faster", "dearer", "older", "heavier"}


def test_comparisons_are_right() -> None:
    verdicts: Counter[str] = Counter()
    for one in samples("compare", _MANY, seed=3):
        (first, low), (second, high) = one.facts.items()
        for thing, value in one.facts.items():
            assert re.search(rf"{thing}\b[^,?]*?\b{value}\b|{value} of {thing}", one.prompt, re.IGNORECASE)
        told = re.fullmatch(r"I read (\w+) (?:and|against) (\w+): ([\w ]+)\.", one.answer)
        assert told is not None
        assert told.groups()[:2] == (low, high)
        verdict = told[3]
        verdicts[verdict] += 1
        if " and " in one.answer:
            assert verdict == ("the same" if low == high else "different")
            assert f"Do {first} and {second} have the same" in one.prompt or "same city" in one.prompt
            continue
        order = _ORDER.get(one.kind, _NUMBERS)
        sign = order.index(low) - order.index(high)
        assert f"{verdict} or " in one.prompt or f" or {verdict}" in one.prompt or verdict == "equal"
        assert re.search(rf"Is {first} \w+ or \w+ than {second}\?", one.prompt)
        assert (verdict in _LESS, verdict in _MORE, verdict == "equal") == (sign < 0, sign > 0, sign == 0)
    assert min(verdicts["the same"], verdicts["different"], verdicts["equal"]) > 0.05 * _MANY


def test_summaries_and_replies_use_the_facts_in_the_prompt() -> None:
    for task in ("summarise", "converse"):
        for one in samples(task, _MANY, seed=3):
            for name, value in one.facts.items():
                if name == "hello":
                    greeting = value if value.startswith("Good") else "Hello"
                    assert one.answer.startswith(f"{greeting}, {one.facts['name']}!")
                elif (one.kind, name) != ("complaint", "day"):  # told, but no part of the reply
                    assert value in one.answer, (one, name)
    for one in samples("summarise", _MANY, seed=3):
        if one.kind == "match":
            assert int(one.facts["high"]) > int(one.facts["low"])


def test_unknown_names_are_refused_with_the_known() -> None:
    with pytest.raises(UnknownName, match="summarise"):
        sample("translate")
    with pytest.raises(UnknownName, match="heldout"):
        sample("compare", split="test")  # type: ignore[arg-type]
