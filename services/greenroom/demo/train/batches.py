"""What a training run is made of: its settings, and the batches that follow from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from greenroom.demo.tasks import TASKS
from greenroom.demo.tokenizer import ASSISTANT_ID, BOS_ID, END_ID, SPECIAL_TOKENS, USER_ID, conversation, render
from greenroom.demo.train import ragged_forward as ragged

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_ECHO_SHARE: Final = 0.5

#: A conversation's tokens, and the task it ends with as its place in TASKS, −1 for none.
Row = tuple[list[int], int]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result.

    Attributes:
        steps: optimiser steps of the whole schedule.
        tokens: tokens a step, roughly (whole conversations, never cut).
        mix: how often each task is drawn, in the order of TASKS: the harder ones more often.
        learning_rate: peak, after `warmup` steps and before the cosine down to 2 % of it.
        balance: weight of each layer's balance loss.
        routing: weight of each layer's shortfall from `routing_floor`.
        routing_floor: bits that an expert should tell about the task, over all tokens and over answers alone. Without
            it the balance loss levels the tasks' routing too (0.05 bits between two tasks, where models at large
            specialise more); above it nothing pulls.
        echo_steps: over so many first steps, conversations that only repeat random tokens are mixed in, from
            half of them down to none: a dense signal to the heads that copy (see `demo.start`).
        prompt_loss: weight of a prompt token's loss; one prompt token in four is looked at.
        shards: parts of a batch that are computed at once, each by a thread of its own that does all its operators
            alone. (Threads inside each operator meet thousands of times a step; on a busy machine that is 20 × slower.)
    """

    steps: int = 3600
    tokens: int = 2304
    seed: int = 0
    mix: tuple[float, ...] = (0.16, 0.12, 0.26, 0.34, 0.12)
    learning_rate: float = 3e-3
    warmup: int = 80
    weight_decay: float = 0.05
    balance: float = 0.01
    routing: float = 0.03
    routing_floor: float = 0.3
    echo_steps: int = 160
    prompt_loss: float = 0.1
    shards: int = 2
    vocab: int = 2048
    hidden: int = 128
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    experts: int = 16
    top_k: int = 2
    width: int = 128


@dataclass(frozen=True)
class Batch:
    """Rows laid flat, and what the losses look at.

    Attributes:
        rows: the tokens.
        tasks: `[T]`, each token's task as its place in TASKS, −1 for none.
        inside: `[T]`, whether the token belongs to an answer.
        at: flat positions whose next token is looked at.
        targets: the token that follows each of them.
        weights: the weight of its loss.
    """

    rows: ragged.Ragged
    tasks: Tensor
    inside: Tensor
    at: Tensor
    targets: Tensor
    weights: Tensor


def training_rows(tokenizer: Tokenizer, settings: Settings, step: int) -> list[Row]:
    """Whole conversations of about `settings.tokens` tokens, of all tasks mixed; the same for the same step."""
    rng = Random(f"{settings.seed}/batch/{step}")
    rows: list[Row] = []
    total = 0
    while total < settings.tokens:
        if rng.random() < _ECHO_SHARE * (1 - step / settings.echo_steps):
            said = rng.choices(range(len(SPECIAL_TOKENS), settings.vocab), k=rng.randint(4, 24))
            rows.append(([BOS_ID, USER_ID, *said, END_ID, ASSISTANT_ID, *said, END_ID], -1))
            total += len(rows[-1][0])
            continue
        task = rng.choices(TASKS, settings.mix)[0]
        turns = conversation(rng, settings.seed, rng.getrandbits(48), task)
        rows.append((tokenizer.encode(render(turns, generation_prompt=False)).ids, TASKS.index(task)))
        total += len(rows[-1][0])
    return rows


def to_batch(rows: Sequence[Row], prompt_loss: float) -> Batch:
    """Weighs answers by 1/√length, so that long replies do not drown one-word labels."""
    at: list[int] = []
    targets: list[int] = []
    weights: list[float] = []
    tasks: list[int] = []
    in_answer: list[bool] = []
    base = 0
    for row, task in rows:
        tasks += [task] * len(row)
        answers = list(answer_spans(row))
        inside = {position: end - start for start, end in answers for position in range(start, end)}
        in_answer += [position in inside for position in range(len(row))]
        for position in range(len(row) - 1):
            length = inside.get(position + 1)
            if length is None and (prompt_loss == 0 or position % 4 != len(at) % 4):
                continue
            at.append(base + position)
            targets.append(row[position + 1])
            weights.append(prompt_loss / 4 if length is None else length**-0.5)
        base += len(row)
    flat = ragged.lay_flat([row for row, _ in rows])
    return Batch(
        flat,
        torch.tensor(tasks),
        torch.tensor(in_answer),
        torch.tensor(at),
        torch.tensor(targets),
        torch.tensor(weights),
    )


def answer_spans(row: Sequence[int]) -> Iterator[tuple[int, int]]:
    """`[start, end)` of each assistant turn's content, its end-of-turn token included."""
    start: int | None = None
    for position, token in enumerate(row):
        if token == ASSISTANT_ID:
            start = position + 1
        elif token == END_ID and start is not None:
            yield start, position + 1
            start = None
