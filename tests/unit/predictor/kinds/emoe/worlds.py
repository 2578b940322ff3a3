"""Sequences whose next distribution follows from the one before."""

from __future__ import annotations

import numpy as np

from greenroom.predictor.kinds.emoe.sequences import Sequences, stack
from greenroom.predictor.traces.counts import count_slots
from greenroom.predictor.traces.samples import Sample


def topics(
    count: int, *, layers: int = 3, experts: int = 8, topics: int = 4, rows: int = 60, stay: float = 1.0, seed: int = 0
) -> Sequences:
    """Prompts of two task types, one after the other. A prompt is of a topic, the next one of its type of the topic
    after it (with the probability ``stay``, else of any). So the previous prompt tells the next one, while over all
    prompts of a type every expert is as frequent as the others. Two slots: the expert of the topic and layer, and the
    one after it, in seven rows of eight; else any other."""
    random = np.random.default_rng(seed)
    now = [0, topics // 2]
    samples = []
    for number in range(count):
        kind = number % 2
        now[kind] = (now[kind] + 1) % topics if random.random() < stay else int(random.integers(topics))
        first = (2 * now[kind] + np.arange(layers)) % experts
        picks = np.stack([first, (first + 1) % experts], axis=1)[None].repeat(rows, axis=0)
        astray = random.random(rows) < 1 / 8
        picks[astray] = (picks[astray] + random.integers(2, experts - 1, (int(astray.sum()), 1, 1))) % experts
        samples.append(Sample("ab"[kind], count_slots(picks, experts)[None]))
    return stack(samples)


def random_sequences(
    count: int = 12, *, layers: int = 3, slots: int = 2, experts: int = 5, seed: int = 0, tasks: str = "ab"
) -> Sequences:
    random = np.random.default_rng(seed)
    names = tuple(tasks[int(random.integers(len(tasks)))] for _ in range(count))
    return Sequences(names, random.integers(0, 9, (count, layers, slots, experts)).astype(np.uint16))
