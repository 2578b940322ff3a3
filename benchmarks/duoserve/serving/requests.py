"""The requests: when they come, how long they are, and where each of their rows is routed."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.inputs.arrivals import BURSTINESS, recorded_arrivals
from greenroom.replay import RoutingTrace
from greenroom_load.arrivals import Gamma
from greenroom_load.lengths import Lengths
from greenroom_load.traces import Recorded, read_trace

PROMPTS: Final = Lengths.parse("lognormal:549,1.22", field="prompts", most=14_050)
ANSWERS: Final = Lengths.parse("lognormal:181,0.556", field="answers", most=1000)
"""Where nothing was recorded: of the mean, the 95th percentile and the most of Azure's conversations of 2023, which are
1,155, 4,083 and 14,050 tokens of prompt and 211, 451 and 1,000 of answer."""


@dataclass(frozen=True, slots=True)
class Request:
    """``at_s``: when it comes, from the first request on, at one request a second in the mean."""

    at_s: float
    prompt: int
    answer: int

    @property
    def rows(self) -> int:
        """That go through the model: the last token of the answer does not."""
        return self.prompt + self.answer - 1

    def at_rate(self, rate: float) -> Request:
        """The same at ``rate`` requests a second."""
        return replace(self, at_s=self.at_s / rate)


def requests_of(count: int, seed: int, *, shorter: float = 1.0) -> list[Request]:
    """``count`` requests in the order in which they come. ``shorter``: lengths are divided by so much.

    They follow each other in Azure's trace where GREENROOM_DATA has it, from a place that the seed draws. Else gaps and
    lengths are drawn. Equal seeds give the same requests.
    """
    random = Random(f"serving/{seed}")
    path = recorded_arrivals()
    found = _drawn(count, random) if path is None else _part(_recorded(path), count, random)
    seconds = found[-1].at_s - found[0].at_s
    scale = (count - 1) / seconds if seconds else 0.0
    return [
        Request(
            scale * (one.at_s - found[0].at_s),
            max(1, round((one.input_tokens or 1) / shorter)),
            max(1, round((one.output_tokens or 1) / shorter)),
        )
        for one in found
    ]


def _drawn(count: int, random: Random) -> list[Recorded]:
    times = [arrival.at_s or 0.0 for arrival in islice(Gamma(1.0, BURSTINESS).times(random), count)]
    return [Recorded(at, PROMPTS.draw(random, None), ANSWERS.draw(random, None)) for at in times]


def _part(recorded: Sequence[Recorded], count: int, random: Random) -> list[Recorded]:
    first = random.randrange(len(recorded) - count + 1)
    return list(recorded[first : first + count])


@cache
def _recorded(path: Path) -> tuple[Recorded, ...]:
    return read_trace(path)


class Routes:
    """Rows for requests of any length, of recorded sequences one after the other. Raises ValueError for no sequence.

    A request begins with all sequences of one subject. Where it is longer than these, it goes on with those of the
    subjects that follow by name, so that no row comes twice before all have come. Recorded decode rows stand for
    prompts' where no prompts were recorded.
    """

    def __init__(self, trace: RoutingTrace, subjects: Sequence[str]) -> None:
        lengths = np.diff(trace.seq_starts)
        by_subject: dict[str, list[int]] = defaultdict(list)
        for sequence, subject in enumerate(subjects):
            if lengths[sequence]:
                by_subject[subject].append(sequence)
        if not by_subject:
            raise ValueError("no recorded sequence has a row")
        self._trace = trace
        self._subjects = [by_subject[name] for name in sorted(by_subject)]

    def rows(self, count: int, random: Random) -> NDArray[np.integer[Any]]:
        """Picks ``[count, layers, k]`` of a request whose subject and order of sequences are drawn."""
        found: list[NDArray[np.integer[Any]]] = []
        left = count
        for sequence in self._order(random):
            start, end = self._trace.seq_starts[sequence : sequence + 2].tolist()
            found.append(self._trace.experts[start : min(end, start + left)])
            left -= len(found[-1])
            if not left:
                break
        return np.concatenate(found)

    def _order(self, random: Random) -> Iterator[int]:
        """For ever, since the last one may come before the request is long enough."""
        at = random.randrange(len(self._subjects))
        while True:
            own = self._subjects[at % len(self._subjects)]
            yield from random.sample(own, len(own))
            at += 1


def subjects_of(trace: RoutingTrace, path: Path | None) -> list[str]:
    """Each sequence's: the task that the trace has recorded, or ``category`` of its line in the file of a trace's
    descriptions beside it (``name.meta.jsonl`` of ``name.npz``). Without either all are of one."""
    if trace.task is not None:
        return list(trace.task)
    file = None if path is None else path.with_suffix(".meta.jsonl")
    if file is None or not file.exists():
        return [""] * trace.sequences
    lines = file.read_text().splitlines()[: trace.sequences]
    found = [str(json.loads(line).get("category", "")) for line in lines]
    return found + [""] * (trace.sequences - len(found))
