"""The requests of the simulated and the real runs: task types, lengths, arrivals, SLOs, labels."""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from greenroom.core.model_profile import Lengths, ModelProfile
from greenroom.policies.base.events import UNKNOWN_TASK
from greenroom_load.traces import Recorded, read_trace

SLO_MULTIPLES = (2.0, 5.0, 10.0)
"""End-to-end SLOs are such multiples of what a task takes alone, drawn uniformly for each request."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. ``output_tokens``: what it will generate, which only the scheduler with hindsight is told.

    ``label``: the task type that was recognised, which may be wrong. ``slo_e2e_ms`` counts from ``at_ms``.
    """

    request_id: str
    task: str
    at_ms: float
    input_tokens: int
    output_tokens: int
    max_tokens: int
    slo_e2e_ms: float | None = None
    label: str = UNKNOWN_TASK


@dataclass(frozen=True)
class Population:
    """What requests are drawn from: pairs of tokens in and out by task type, and the most tokens of an answer."""

    pairs: Mapping[str, tuple[tuple[int, int], ...]]
    max_tokens: int

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.pairs)

    def mean_output(self, task: str) -> float:
        """An unknown task type has the mean of all."""
        of = self.pairs.get(task) or tuple(pair for pairs in self.pairs.values() for pair in pairs)
        return sum(tokens for _, tokens in of) / len(of)

    def mean_input(self, task: str) -> float:
        return sum(tokens for tokens, _ in self.pairs[task]) / len(self.pairs[task])


def of_profile(profile: ModelProfile, *, max_tokens: int, draws: int = 400, seed: int = 0) -> Population:
    """Lengths drawn from the profile's distributions, in and out independently."""
    rng = random.Random(seed)
    pairs = {}
    for task, known in profile.tasks.items():
        draw_in, draw_out = _sampler(known.input_tokens), _sampler(known.generated_tokens)
        pairs[task] = tuple(
            (max(1, round(draw_in(rng.random()))), max(1, min(max_tokens, round(draw_out(rng.random())))))
            for _ in range(draws)
        )
    return Population(pairs, max_tokens)


def _sampler(lengths: Lengths) -> Callable[[float], float]:
    """A length for the share of prompts below it: from the distribution's steps, or lines between its percentiles."""
    if lengths.cdf:
        steps = [share for _, share in lengths.cdf]
        tokens = [token for token, _ in lengths.cdf]
        return lambda share: tokens[min(bisect.bisect_left(steps, share), len(tokens) - 1)]
    points = ((0.0, lengths.p50 / 2), (0.5, lengths.p50), (0.9, lengths.p90), (0.99, lengths.p99))
    ordered = (*points, (1.0, lengths.most))

    def at(share: float) -> float:
        place = max(1, min(bisect.bisect_left([point for point, _ in ordered], share), len(ordered) - 1))
        (low, below), (high, above) = ordered[place - 1], ordered[place]
        return below + (above - below) * (share - low) / (high - low)

    return at


def poisson(population: Population, rate: float, count: int, seed: int) -> list[Job]:
    """``count`` requests at ``rate`` a second: Poisson, the task types uniformly (eMoE, section 2.1).

    The same seed gives the same tasks and lengths at every rate; only the gaps are scaled.
    """
    gaps = random.Random(f"{seed}/gaps")
    times = list(accumulate(gaps.expovariate(1.0) for _ in range(count)))
    return _jobs(population, [1e3 * at / rate for at in times], seed)


def _jobs(population: Population, times_ms: Sequence[float], seed: int) -> list[Job]:
    rng = random.Random(f"{seed}/tasks")
    jobs = []
    for number, at in enumerate(times_ms):
        task = rng.choice(population.tasks)
        tokens_in, tokens_out = rng.choice(population.pairs[task])
        jobs.append(Job(f"r{number:06}", task, at, tokens_in, tokens_out, population.max_tokens, label=task))
    return jobs


CONVERSATION = "conversation"


@dataclass(frozen=True)
class AzureTraffic:
    """Recorded traffic. Its first half tells what to expect; requests are of the second."""

    recorded: tuple[Recorded, ...]
    longest: int

    @classmethod
    def read(cls, path: Path, *, longest: int = 4096) -> AzureTraffic:
        """Requests longer than ``longest``, in and out together, are left out."""
        whole = tuple(
            one for one in read_trace(path) if one.input_tokens and one.output_tokens
            and one.input_tokens + one.output_tokens <= longest
        )  # fmt: skip
        return cls(whole, longest)

    @property
    def population(self) -> Population:
        first = self.recorded[: len(self.recorded) // 2]
        return Population(
            {CONVERSATION: tuple((one.input_tokens or 1, one.output_tokens or 1) for one in first)}, self.most_output
        )

    @property
    def most_output(self) -> int:
        """What every request may generate, as clients ask for more than they get."""
        return max(one.output_tokens or 1 for one in self.recorded)

    def jobs(self, rate: float, count: int, seed: int) -> list[Job]:
        """``count`` requests in a row, from a place that the seed draws. Their gaps are scaled to ``rate`` a second."""
        half = len(self.recorded) // 2
        begin = random.Random(f"{seed}/place").randrange(half, max(half + 1, len(self.recorded) - count))
        part = self.recorded[begin : begin + count]
        scale = 1e3 / rate * (len(part) - 1) / max(1e-9, part[-1].at_s - part[0].at_s)
        most = self.most_output
        return [
            Job(f"r{number:06}", CONVERSATION, (one.at_s - part[0].at_s) * scale, one.input_tokens or 1,
                one.output_tokens or 1, most, label=CONVERSATION)
            for number, one in enumerate(part)
        ]  # fmt: skip


def with_slos(
    jobs: Sequence[Job], alone_ms: Mapping[str, float], seed: int, multiples: Sequence[float] = SLO_MULTIPLES
) -> list[Job]:
    """Each job with an end-to-end SLO: a drawn multiple of ``alone_ms``, what its task takes alone."""
    rng = random.Random(f"{seed}/slos")
    return [replace(job, slo_e2e_ms=rng.choice(multiples) * alone_ms[job.task]) for job in jobs]


def with_wrong_labels(jobs: Sequence[Job], accuracy: float, seed: int) -> list[Job]:
    """A share of 1 − ``accuracy`` of the labels is replaced by another task type at random (eMoE, Fig. 19)."""
    rng = random.Random(f"{seed}/labels")
    tasks = sorted({job.task for job in jobs})
    corrupted = []
    for job in jobs:
        wrong, other = rng.random() >= accuracy, rng.choice([task for task in tasks if task != job.task] or tasks)
        corrupted.append(replace(job, label=other) if wrong else job)
    return corrupted


def without_labels(jobs: Sequence[Job]) -> list[Job]:
    return [replace(job, label=UNKNOWN_TASK) for job in jobs]
