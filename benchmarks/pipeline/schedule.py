"""Which requests are sent when, and what became of them: the same for both arms."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from greenroom.demo.tasks import TASKS, samples


@dataclass(frozen=True, slots=True)
class Planned:
    """One request, ``at`` seconds from the start."""

    at: float
    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds from when a request was due: ``ttft`` to its first token, ``total`` to its last. ``itl``: mean between
    tokens.

    ``refused``: what it was answered instead.
    """

    ttft: float = 0.0
    itl: float = 0.0
    tokens: int = 0
    total: float = 0.0
    refused: str = ""


def prompts(count: int) -> list[str]:
    drawn = [sample.prompt for task in TASKS for sample in samples(task, -(-count // len(TASKS)), seed=11)]
    random.Random(5).shuffle(drawn)
    return drawn[:count]


def poisson(texts: Sequence[str], rate: float, seconds: float, tokens: int, seed: int) -> list[Planned]:
    draw = random.Random(seed)
    plan: list[Planned] = []
    at = draw.expovariate(rate)
    while at < seconds:
        plan.append(Planned(at, texts[len(plan) % len(texts)], tokens))
        at += draw.expovariate(rate)
    return plan


def closed(texts: Sequence[str], count: int, tokens: int) -> list[Planned]:
    """All at once; how many are under way is the sender's business."""
    return [Planned(0.0, texts[number % len(texts)], tokens) for number in range(count)]
