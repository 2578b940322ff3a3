"""What is asked: prompts of the bundled model's tasks, and others that policies learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from benchmarks.harness.inputs.shared_model import Ask, SharedModel
from benchmarks.harness.inputs.token_streams import Stream
from greenroom.demo.tasks import TASKS, Sample, sample

SEED = 61_000
_LEARNT_FROM = SEED + 1


def in_turn(shared: SharedModel, count: int) -> list[Ask]:
    """``count`` held-out prompts of the tasks in turn, each answered at the length of its right answer.

    So the routing is that of the work the model was trained for.
    """
    drawn = [sample(TASKS[number % len(TASKS)], seed=SEED, index=number) for number in range(count)]
    return [shared.ask(one.task, one.prompt, one.answer) for one in drawn]


def mixed(shared: SharedModel, count: int, seed: int) -> list[Ask]:
    """Of any task, as they would come from many people."""
    random = Random(f"{SEED}/{seed}")
    drawn = [sample(random.choice(TASKS), seed=SEED + seed, index=number) for number in range(count)]
    return [shared.ask(one.task, one.prompt, one.answer) for one in drawn]


def shortened(asks: Sequence[Ask], tokens: int | None) -> list[Ask]:
    """The same with at most so many tokens of an answer; None: all."""
    return [replace(ask, answer_ids=ask.answer_ids[:tokens]) for ask in asks]


def to_learn_from(count: int) -> list[Sample]:
    """Of the other split: no content of these is ever asked."""
    random = Random(_LEARNT_FROM)
    return [sample(random.choice(TASKS), seed=_LEARNT_FROM, index=number, split="train") for number in range(count)]


def stream_of(asks: Sequence[Ask]) -> Stream:
    """As a child process takes it."""
    return Stream(tuple(ask.prompt_ids for ask in asks), tuple(len(ask.answer_ids) for ask in asks))
