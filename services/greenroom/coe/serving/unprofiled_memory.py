"""What batches take at most where no profile says it: measured at the start, or bounded where that would take long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input, Prepared
from greenroom.coe.computing.intermediates import bytes_of_prepared, intermediate_bytes
from greenroom.core.units import GIB
from greenroom.experts.pack.layout import ExpertWeights

LARGE: Final = 8
_SOON_TOKENS: Final = 512
"""Texts up to that length, as most classifiers take them, are measured in batches too."""
_MOST_S: Final = 3.0
_MOST_BYTES: Final = GIB
KEPT: Final = 1.2
"""Of what is used, what allocators take from the system, since holes stay where something was freed."""


def unprofiled_bytes(
    computer: ExpertComputer,
    expert: int,
    sample: Input,
    weights: ExpertWeights,
    *,
    most_s: float = _MOST_S,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, int]:
    """By requests in a batch, the bytes of intermediates that inputs like ``sample`` take at most.

    ``sample``: an image as large as they come (``ExpertComputer.largest``), or a short text. A batch takes most if all
    its images are that large and lie the same way: others are computed apart. If such a batch would take more than
    ``most_s`` or a GiB to measure, it takes at most so many times what one takes.

    A text may be as long as the expert takes it: then one of that length is measured, and a batch takes at most as many
    times that. If the longest would take more than ``most_s`` or a GiB to measure, a shorter one is, and memory grows
    with the square of the length at most, as attention's does.

    KEPT counts what allocators keep (docs/decisions/0031); a profile has it from the process's own peak.
    """
    used = _used(computer, expert, sample, weights, most_s, clock)
    return {count: int(KEPT * nbytes) for count, nbytes in used.items()}


def _used(
    computer: ExpertComputer,
    expert: int,
    sample: Input,
    weights: ExpertWeights,
    most_s: float,
    clock: Callable[[], float],
) -> dict[int, int]:
    longest = computer.longest(expert)
    if longest is None:
        begun = clock()
        image = intermediate_bytes(computer, expert, [sample], weights)
        if LARGE * (clock() - begun) > most_s or LARGE * image > _MOST_BYTES:
            return {1: image, LARGE: LARGE * image}
        return {1: image, LARGE: intermediate_bytes(computer, expert, [sample] * LARGE, weights)}
    (short,) = computer.prepare(expert, [sample])
    if longest <= _SOON_TOKENS:
        texts = {count: _repeated(short, longest, count) for count in (1, LARGE)}
        return {count: bytes_of_prepared(computer, expert, text, weights) for count, text in texts.items()}
    tokens, left_s = _SOON_TOKENS, most_s
    while True:
        begun = clock()
        one = bytes_of_prepared(computer, expert, _repeated(short, tokens, 1), weights)
        took_s = clock() - begun
        left_s -= took_s
        if tokens == longest:
            break
        if 4 * took_s > left_s or 4 * one > _MOST_BYTES:  # twice the tokens take up to four times as much
            one = -(-one * longest**2 // tokens**2)
            break
        tokens = min(2 * tokens, longest)
    return {1: one, LARGE: LARGE * one}


def _repeated(short: Prepared, tokens: int, count: int) -> Prepared:
    """A batch of ``count`` texts of exactly so many tokens, made of those of one short text."""
    times = -(-tokens // short.tensors["input_ids"].shape[1])
    return Prepared({name: tensor.repeat(count, times)[:, :tokens] for name, tensor in short.tensors.items()})
