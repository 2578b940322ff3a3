"""Where prompts come from."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.demo.tasks import TASKS, sample
from greenroom_load.prompts import FilePrompts, Prompt, TemplatedPrompts, Turn
from tests.real_data import real_data


def test_templated_prompts_are_the_bundled_models_held_out_ones_in_order() -> None:
    prompts = TemplatedPrompts(7)
    first, second = prompts.draw("compare", None), prompts.draw("compare", None)

    for number, prompt in enumerate((first, second)):
        drawn = sample("compare", seed=7, index=number, split="heldout")
        assert prompt == Prompt((Turn("user", drawn.prompt),), "compare", f"compare-{number}", drawn.answer)
    assert set(prompts.mix.shares) == set(TASKS)


def test_longer_prompts_have_earlier_turns_of_their_task_and_no_known_answer() -> None:
    prompts = TemplatedPrompts(7, tokens_per_word=2.0)
    long = prompts.draw("question", 400)
    words = sum(len(turn.content.split()) for turn in long.turns)

    assert [turn.role for turn in long.turns] == ["user", "assistant"] * (len(long.turns) // 2) + ["user"]
    assert 200 <= words <= 200 + 120, "as long as asked for, to within one exchange"
    assert long.expected is None
    assert prompts.draw("question", 1).expected is not None, "it is long enough by itself"


def jsonl(folder: Path, *lines: object) -> FilePrompts:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines), encoding="utf-8")
    return FilePrompts(path, seed=1)


def test_a_files_prompts_come_in_rounds_by_task(tmp_path: Path) -> None:
    prompts = jsonl(
        tmp_path,
        *({"task_type": "a", "prompt": f"a{n}", "source": "ignored"} for n in range(20)),
        "",
        {"task": "b", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "b0"}]},
        {"prompt": "none", "id": 3, "expected": "right", "max_tokens": 5},
    )
    drawn = [prompts.draw("a", None) for _ in range(60)]
    texts = [one.text for one in drawn]

    assert prompts.mix.shares == pytest.approx({"a": 20 / 22, "b": 1 / 22, "": 1 / 22})
    for start in (0, 20, 40):
        assert sorted(texts[start : start + 20]) == sorted(f"a{n}" for n in range(20))
    assert texts[:20] not in (texts[20:40], sorted(texts[:20]))
    assert [one.repeat for one in drawn] == [False] * 20 + [True] * 40
    assert prompts.draw("b", None).turns == (Turn("system", "s"), Turn("user", "b0"))
    assert prompts.draw("", None) == Prompt((Turn("user", "none"),), None, "3", "right", 5)


def test_the_seed_decides_the_order(tmp_path: Path) -> None:
    jsonl(tmp_path, *({"prompt": str(n)} for n in range(30)))
    orders = [
        [one.draw("", None).text for _ in range(30)]
        for one in (FilePrompts(tmp_path / "prompts.jsonl", seed) for seed in (1, 1, 2))
    ]

    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{"], "line 1"),
        ([{"prompt": "x"}, {"text": "y"}], "line 2.*neither"),
        ([{"prompt": 5}], "line 1"),
        ([{"messages": [{"role": "user"}]}], "line 1.*content"),
        ([{"prompt": "x", "max_tokens": 0}], "max_tokens"),
        (["[]"], "line 1"),
        ([], "at least one prompt"),
    ],
)
def test_what_is_no_prompt_is_refused_with_its_line(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        jsonl(tmp_path, *lines)


def test_real_prompts_work_as_they_are() -> None:
    prompts = FilePrompts(real_data("prompts/task-types.jsonl"), seed=0)

    assert prompts.mix.shares == pytest.approx(dict.fromkeys(TASKS, 0.2))
    rng = Random(0)
    for task in rng.choices(TASKS, k=100):
        assert prompts.draw(task, None).task == task
