"""What an arm is told and what it answers. Standard library only: llama.cpp's environment has no greenroom.

A job is one JSON object on stdin: ``model`` (a path), ``batches`` and the arm's own ``settings``. A batch has
``prompts``, lists of token ids, and ``forced``: for each prompt the tokens that follow it, whatever the model would
pick, so that all arms compute the same and route alike. The answer is the last line of stdout, one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Batch:
    """Sequences that are decoded at once."""

    prompts: tuple[tuple[int, ...], ...]
    forced: tuple[tuple[int, ...], ...]

    @property
    def sequences(self) -> int:
        return len(self.prompts)

    def first(self, sequences: int, tokens: int) -> Batch:
        """Only so many sequences, and so many forced tokens of each."""
        return Batch(self.prompts[:sequences], tuple(forced[:tokens] for forced in self.forced[:sequences]))


@dataclass(frozen=True)
class Decoded:
    """How a batch went. ``arrivals``: for each sequence when each of its tokens had been picked, in seconds since the
    batch began. ``greedy``: what the model would have picked. ``read_bytes``: read from disk after the prompts.
    """

    arrivals: tuple[tuple[float, ...], ...]
    greedy: tuple[tuple[int, ...], ...]
    read_bytes: int

    @property
    def prompt_s(self) -> float:
        """Until every sequence had its first token."""
        return max(times[0] for times in self.arrivals)

    def rate(self, skip: int) -> float:
        """Tokens/s while all sequences decode, from the ``skip``-th token behind the first on."""
        return decode_rate(self.arrivals, skip)


def decode_rate(arrivals: Sequence[Sequence[float]], skip: int) -> float:
    """Tokens a second in the time in which every sequence had more than ``skip`` tokens and none had its last.

    Sequences may have begun in different steps. Raises ValueError where there is no such time.
    """
    begin = max(times[skip] for times in arrivals)
    end = min(times[-1] for times in arrivals)
    tokens = sum(begin < at <= end for times in arrivals for at in times)
    if tokens == 0:
        raise ValueError(f"no token lies in the time in which all {len(arrivals)} sequences decode")
    return tokens / (end - begin)


def read_job() -> tuple[str, list[Batch], dict[str, Any]]:
    """Model, batches and settings, from stdin; what libraries print to stdout goes to stderr from now on."""
    told = json.load(sys.stdin)
    return told["model"], [batch_of(batch) for batch in told["batches"]], told["settings"]


def batch_of(told: dict[str, Any]) -> Batch:
    return Batch(tuple(map(tuple, told["prompts"])), tuple(map(tuple, told["forced"])))


@contextlib.contextmanager
def answering() -> Iterator[dict[str, Any]]:
    """Yields the answer to be filled; prints it at the end. Meanwhile stdout is stderr, whoever writes to it."""
    sys.stdout.flush()
    answer_fd = os.dup(1)
    os.dup2(2, 1)
    answer: dict[str, Any] = {}
    try:
        yield answer
        with os.fdopen(os.dup(answer_fd), "w") as stream:
            stream.write(json.dumps(answer) + "\n")
    finally:
        sys.stdout.flush()
        os.close(answer_fd)
