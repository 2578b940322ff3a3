"""How well the shipped keywords tell real prompts apart, of wordings not looked at when the keywords were chosen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom.tasktype.evaluate import Evaluation, LabelledPrompt, evaluate
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from tests.real_data import real_data

HELD_OUT = Path(__file__).parent / "held_out.json"
"""By task type: the sources whose prompts were put aside."""


@pytest.mark.parametrize(
    ("prompt", "task_type"),
    [
        ("Summarise the following text in two lines: ...", "summarise"),
        ("Write a synopsis for the following text: ...", "summarise"),
        ("... long text ...\n\nTL;DR:", "summarise"),
        ("Is this review positive or negative? I loved it.", "classify"),
        ("Which category does this article belong to?", "classify"),
        ("Answer the question based on the context. Question: who wrote it?", "question"),
        ("Which of the following is correct? Choose the best answer.", "question"),
        ("Do these two sentences mean the same thing?", "compare"),
        ("What is the difference between a violin and a viola?", "compare"),
        ("Hello! Can you help me write an email to my landlord?", "converse"),
        ("Imagine you are a pirate. Tell me a story.", "converse"),
        ("Lorem ipsum dolor sit amet", "unknown"),
    ],
)
def test_plain_wordings(prompt: str, task_type: str) -> None:
    assert KeywordExtractor(load_profile()).extract(prompt).task_type == task_type


def test_held_out_prompts() -> None:
    path = real_data("prompts/task-types.jsonl")
    held_out = {label: set(sources) for label, sources in json.loads(HELD_OUT.read_text()).items()}
    prompts = []
    for line in filter(None, path.read_bytes().split(b"\n")):
        entry = json.loads(line)
        if entry["source_task"] in held_out[entry["task_type"]]:
            prompts.append(LabelledPrompt(entry["prompt"], entry["task_type"]))
    assert len(prompts) == 658
    evaluation: Evaluation = evaluate(KeywordExtractor(load_profile()), prompts)
    assert evaluation.accuracy >= 0.70, evaluation.report()
    assert evaluation.unknown <= 0.12, evaluation.report()
