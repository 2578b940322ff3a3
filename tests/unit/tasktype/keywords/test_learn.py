"""Keywords that are learnt: for the extractor's rule, from what may be learnt from, for prompts that were not seen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from greenroom.cli import main
from greenroom.core.errors import InvalidConfig
from greenroom.demo.tasks import TASKS, samples
from greenroom.tasktype import UNKNOWN
from greenroom.tasktype.confusion_plot import draw_confusion
from greenroom.tasktype.evaluate import Evaluation, LabelledPrompt, evaluate, read_labelled
from greenroom.tasktype.keywords import KeywordExtractor, load_profile, parse_profile
from greenroom.tasktype.keywords.candidates import Phrases
from greenroom.tasktype.keywords.learn import LearnConfig, learn_keywords
from greenroom.tasktype.keywords.profile import LookAt, Profile, TypeKeywords, dump_profile
from greenroom.tasktype.keywords.selection import Selection
from tests.real_data import real_data

HELD_OUT = Path(__file__).parent / "held_out.json"
FAST = LearnConfig(folds=2, most_keywords=50)
THINGS = ("the sea", "a hill", "two cats", "my boat", "the old town", "a red car", "some rain", "the moon")
ASKS = {
    "summarise": ("Sum up this text about {}", "Write a summary of {}", "In brief please {}"),
    "question": ("Who saw {} yesterday", "Where is {} now", "Answer about {}"),
    "compare": ("Are {} and the sun the same", "Compare {} with it", "Which is larger {} or that"),
}


def prompts_of(asks: Mapping[str, tuple[str, ...]] = ASKS, times: int = 2) -> list[LabelledPrompt]:
    return [
        LabelledPrompt(f"{ask.format(thing)}, number {number}", task, wording=ask)
        for task, wordings in asks.items()
        for ask in wordings
        for thing in THINGS
        for number in range(times)
    ]


def without_wording(prompts: Sequence[LabelledPrompt]) -> list[LabelledPrompt]:
    return [LabelledPrompt(one.prompt, one.task_type) for one in prompts]


def test_patterns_that_were_seen_are_told_apart() -> None:
    learnt = learn_keywords(without_wording(prompts_of()), config=FAST)
    assert learnt.held_out.accuracy == 1.0
    assert learnt.train.accuracy == 1.0
    assert learnt.held_out.prompts == pytest.approx(0.2 * len(prompts_of()), abs=3)
    assert learnt.train.prompts + learnt.held_out.prompts == len(prompts_of())
    assert set(learnt.profile.names) == set(ASKS)
    assert sum(len(task.keywords) for task in learnt.profile.task_types) <= 50
    assert learnt.by_size[50] >= 0.9


def test_what_is_learnt_is_a_file_of_keywords() -> None:
    profile = learn_keywords(prompts_of(), config=FAST).profile
    assert parse_profile(dump_profile(profile), "learnt") == profile


def test_neither_order_nor_copies_of_the_prompts_matter_but_the_seed_does() -> None:
    prompts = without_wording(prompts_of())
    one = learn_keywords(prompts, config=FAST)
    other = learn_keywords([*prompts[::-1], *prompts[:10]], config=FAST)
    assert one.profile == other.profile
    assert one.held_out == other.held_out
    assert one.held_out_prompts != learn_keywords(prompts, seed=1, config=FAST).held_out_prompts


def test_prompts_of_one_wording_are_all_held_out_or_none() -> None:
    learnt = learn_keywords(prompts_of(times=3), config=LearnConfig(held_out=0.4, folds=2, most_keywords=20))
    aside = {one.wording for one in learnt.held_out_prompts}
    assert len(aside) == len(ASKS), "one wording of three of each type"
    assert learnt.held_out.prompts == len(aside) * len(THINGS) * 3


def test_a_type_with_one_wording_is_learnt_from_it() -> None:
    learnt = learn_keywords(prompts_of({name: asks[:1] for name, asks in ASKS.items()}), config=FAST)
    assert learnt.held_out.prompts == 0
    assert learnt.by_size == {}, "nothing can be put aside to try on"
    assert learnt.train.accuracy == 1.0


def test_what_only_one_wording_says_is_no_keyword() -> None:
    """However many prompts it is in."""
    asks = {name: tuple(f"{word} {name} {{}}" for word in "abcdefghijkl") for name in ("one", "two")}
    prompts = prompts_of(asks) + prompts_of({"one": ("oddity one {}",)}, times=20)
    learnt = learn_keywords(prompts, config=LearnConfig(held_out=0, folds=2, most_keywords=30))
    keywords = {keyword for task in learnt.profile.task_types for keyword in task.keywords}
    assert any("one" in keyword for keyword in keywords)
    assert not any("oddity" in keyword for keyword in keywords)


def test_every_type_has_a_keyword_even_where_none_is_worth_it() -> None:
    prompts = [LabelledPrompt(f"x {number}", "much") for number in range(30)]
    prompts += [LabelledPrompt(f"x y {number}", "little") for number in range(2)]
    profile = learn_keywords(prompts, config=LearnConfig(most_keywords=1)).profile
    assert {task.name for task in profile.task_types if task.keywords} == {"much", "little"}


def test_learning_begins_with_what_is_there_and_drops_what_misleads() -> None:
    start = Profile(
        format="greenroom-task-keywords",
        version=1,
        task_types=(
            TypeKeywords("compare", ("larger", "write a summary", "in the same breath as")),
            TypeKeywords("summarise", ("sum up",)),
            TypeKeywords("translate", ("in french",)),
        ),
    )
    learnt = learn_keywords(without_wording(prompts_of()), start=start, config=LearnConfig(folds=2, most_keywords=100))
    keywords = {task.name: set(task.keywords) for task in learnt.profile.task_types}
    assert "write a summary" not in keywords["compare"]
    assert {"larger", "in the same breath as"} <= keywords["compare"], "what no prompt has stays too"
    assert keywords["translate"] == {"in french"}
    assert learnt.held_out.accuracy >= 0.9


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([], "at least two task types"),
        ([LabelledPrompt("a", "one"), LabelledPrompt("b", "one")], "at least two task types"),
        ([LabelledPrompt("a", UNKNOWN), LabelledPrompt("b", "one")], UNKNOWN),
        ([LabelledPrompt("a", "x" * 65), LabelledPrompt("b", "one")], "64 characters"),
        ([LabelledPrompt("...", "one"), LabelledPrompt("b", "two")], "have words"),
        ([LabelledPrompt("...", "one"), LabelledPrompt("!", "two")], "have words"),
    ],
)
def test_what_can_not_be_learnt_from_is_said(prompts: list[LabelledPrompt], said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        learn_keywords(prompts, config=FAST)


@pytest.mark.parametrize("field", ["folds", "most_keywords", "most_words", "least_wordings", "most_prompts"])
def test_settings_out_of_range_are_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidConfig, match=field):
        LearnConfig(**{field: 0})
    with pytest.raises(InvalidConfig, match="held_out"):
        LearnConfig(held_out=1.0)


WORDS = st.lists(st.sampled_from("abcd"), max_size=12).map(" ".join)


@given(st.data())
def test_what_is_counted_while_learning_is_what_the_extractor_counts(data: st.DataObject) -> None:
    look_at = LookAt(head_chars=9, tail_chars=6)
    texts = data.draw(st.lists(WORDS, min_size=1, max_size=6))
    prompts = [LabelledPrompt(text, "t0") for text in texts]
    also = data.draw(st.sets(st.lists(st.sampled_from("abcd"), min_size=1, max_size=5).map(tuple), max_size=3))
    numbers = np.arange(len(texts))
    candidates = Phrases(prompts, look_at, most_words=3, also=also).candidates(numbers, 1)
    if not candidates.phrases:
        assert not any(texts)
        return
    flags = st.lists(st.booleans(), min_size=3, max_size=3)
    listed = np.array([data.draw(flags) for _ in candidates.phrases], dtype=np.bool_)
    selection = Selection(
        candidates, np.zeros(len(texts), dtype=np.int64), 3, weights=np.ones(len(texts)), price=1.0, listed=listed
    )
    keywords = [
        tuple(" ".join(candidates.phrases[c]) for c in np.flatnonzero(listed[:, kind]).tolist()) for kind in range(3)
    ]
    profile = Profile(
        format="greenroom-task-keywords",
        version=1,
        look_at=look_at,
        task_types=tuple(TypeKeywords(f"t{kind}", own) for kind, own in enumerate(keywords)),
    )
    extractor = KeywordExtractor(profile)
    for text, shares in zip(texts, selection.shares, strict=True):
        matches = extractor.extract(text).scores
        counts = np.array([matches.get(f"t{kind}", 0) for kind in range(3)])
        assert shares == pytest.approx(np.exp(counts) / np.exp(counts).sum())


@given(st.lists(st.tuples(WORDS, st.sampled_from(["x", "y", "z"])), min_size=2, max_size=20))
def test_whatever_is_learnt_is_sound(labelled: list[tuple[str, str]]) -> None:
    prompts = [LabelledPrompt(text, kind) for text, kind in labelled]
    try:
        learnt = learn_keywords(prompts, config=LearnConfig(folds=2, most_keywords=5, held_out=0.3))
    except InvalidConfig:
        kinds = {kind for _, kind in labelled}
        assert len(kinds) < 2 or any(not text for text, _ in labelled)
        return
    assert parse_profile(dump_profile(learnt.profile), "learnt") == learnt.profile
    assert learnt.train.prompts + learnt.held_out.prompts == len(set(prompts))
    assert set(learnt.profile.names) == {kind for _, kind in labelled}


def test_the_bundled_tasks_are_learnt_from_their_own_prompts() -> None:
    prompts = [LabelledPrompt(one.prompt, task) for task in TASKS for one in samples(task, 150, split="train")]
    learnt = learn_keywords(prompts, config=LearnConfig(folds=2, most_keywords=150))
    unseen = [LabelledPrompt(one.prompt, task) for task in TASKS for one in samples(task, 100, split="heldout")]
    evaluation = evaluate(KeywordExtractor(learnt.profile), unseen)
    assert evaluation.accuracy >= 0.97, evaluation.report()
    assert evaluation.unknown <= 0.01
    assert evaluation.accuracy > evaluate(KeywordExtractor(load_profile()), unseen).accuracy


def test_real_prompts_in_wordings_that_were_not_seen() -> None:
    """Better than the keywords that come with greenroom, whose authors had seen as much."""
    prompts = list(read_labelled(real_data("prompts/task-types.jsonl"), wording="source_task"))
    held_out = {label: set(sources) for label, sources in json.loads(HELD_OUT.read_text()).items()}
    unseen = [one for one in prompts if one.wording in held_out[one.task_type]]
    seen = [one for one in prompts if one.wording not in held_out[one.task_type]]
    learnt = learn_keywords(seen, config=LearnConfig(held_out=0, folds=3))
    evaluation = evaluate(KeywordExtractor(learnt.profile), unseen)
    assert evaluation.accuracy >= 0.74, evaluation.report()
    assert evaluation.unknown <= 0.03, evaluation.report()
    assert evaluation.accuracy > evaluate(KeywordExtractor(load_profile()), unseen).accuracy


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_confusion_is_drawn(tmp_path: Path, ending: str) -> None:
    evaluation = Evaluation()
    evaluation.confusion.update({("a", "a"): 3, ("a", "b"): 1, ("b", "unknown"): 2})
    path = tmp_path / f"confusion.{ending}"
    draw_confusion(evaluation, path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    if ending == "svg":
        assert b"50.0 %" in content
        assert b"75 %" in content


def test_the_command_writes_keywords_and_says_how_good_they_are(tmp_path: Path) -> None:
    labelled, output = tmp_path / "labelled.jsonl", tmp_path / "mine.json"
    lines = ({"prompt": one.prompt, "task_type": one.task_type, "id": 7} for one in prompts_of())
    labelled.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["keywords", "learn", str(labelled), "--output", str(output), "--most-keywords", "50"]
    result = CliRunner().invoke(main, [*arguments, "--plot", str(tmp_path / "c.svg")], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["held_out"]["accuracy"] == 1.0
    assert report["shipped_on_held_out"]["prompts"] == report["held_out"]["prompts"]
    assert {task.name: len(task.keywords) for task in load_profile(output).task_types} == report["keywords"]
    assert (tmp_path / "c.svg").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.svg", "labelled.jsonl", "mine.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--output", "absent/mine.json"], "output"),
        (["--plot", "c.doc"], "c.doc"),
        (["--start", "absent.json"], "absent.json"),
    ],
)
def test_the_command_says_what_it_can_not_do(tmp_path: Path, options: list[str], said: str) -> None:
    labelled = tmp_path / "labelled.jsonl"
    labelled.write_text('{"prompt": "a", "task_type": "b"}\n')
    result = CliRunner().invoke(
        main, ["keywords", "learn", str(labelled), "--output", str(tmp_path / "mine.json"), *options]
    )
    assert result.exit_code == 1
    assert said in result.output


def test_a_wording_is_read_from_the_field_that_is_named(tmp_path: Path) -> None:
    path = tmp_path / "labelled.jsonl"
    path.write_text(
        '{"prompt": "a", "task_type": "b", "origin": 3, "wording": "w"}\n{"prompt": "a", "task_type": "b"}\n'
    )
    assert [one.wording for one in read_labelled(path, wording="origin")] == ["3", ""]
    assert [one.wording for one in read_labelled(path)] == ["w", ""]
    path.write_text("7\n")
    with pytest.raises(InvalidConfig, match="line 1"):
        list(read_labelled(path))
