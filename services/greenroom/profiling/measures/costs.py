"""What tokens and expert loads cost on this machine: eMoE's c and its loading latency."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Final

import numpy as np
from msgspec import structs

from greenroom.core.machine import machine_name
from greenroom.core.model_profile import MeasuredCosts
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.base.expert_policy import Target
from greenroom.profiling.model.profiled_model import Asked, ProfileFailed, Subject, request_of

ROWS: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
PROMPT_ROWS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048)
"""Two to four for each doubling: kernels change at some number of rows, and a bend shows only between near points."""
MOST_LOADED: Final = 64
_WARM_STEPS: Final = 3
_READINGS: Final = 3
"""Steps with prompts of one size in one round."""
_BUDGET_S: Final = 5.0
"""For the steps of one batch size in one round, and for the loads of one number."""


def row_counts(most: int) -> list[int]:
    """Batch sizes to measure, up to ``most``."""
    return [rows for rows in ROWS if rows <= most]


def prompt_row_counts(most: int) -> list[int]:
    """Rows of prompts in a step to measure, up to ``most`` and with it."""
    return sorted({rows for rows in PROMPT_ROWS if rows < most} | {min(most, PROMPT_ROWS[-1])})


def load_counts(experts: int) -> list[int]:
    """Numbers of experts to load: powers of two up to half of all."""
    return [1 << power for power in range(MOST_LOADED.bit_length()) if 1 << power <= max(1, experts // 2)]


def measure_costs(
    subject: Subject,
    asked: Sequence[Asked],
    *,
    rounds: int,
    steps: int,
    seed: int,
    done: Callable[[], object],
    loads: bool = True,
) -> MeasuredCosts:
    """Medians over ``rounds`` rounds. Every size has a turn in each round, so other load on the machine hits all alike.

    ``done`` is called after each turn (``turns_of``). Without ``loads`` no loading times are measured. Raises
    ProfileFailed where a prompt is refused.
    """
    sizes = row_counts(subject.engine.config.max_running)
    decoding: dict[int, list[float]] = {size: [] for size in sizes}
    prefilling: list[float] = []
    reading: dict[int, list[float]] = {}
    both: list[tuple[int, int, float]] = []
    for turn in range(rounds):
        for size in sizes:
            own = [asked[(turn + place) % len(asked)] for place in range(size)]
            decoding[size] += _decode_times(subject, own, steps)
            done()
        prefilling.append(_prefill_time(subject, asked))
        done()
        for wanted in _prompt_sizes(subject):
            crowd = crowd_of(subject, [*asked[turn % len(asked) :], *asked[: turn % len(asked)]], wanted)
            rows = sum(len(one.prompt_ids) for one in crowd)
            if rows == wanted or not reading:  # as many prompts as may run are too few, and each round other ones
                reading.setdefault(rows, []).extend(_reading_times(subject, crowd, rows))
            done()
        for decode, prompt in _mixtures(subject):
            both += _mixed_times(subject, asked[turn % len(asked) :], decode, prompt)
            done()
    loading: dict[int, list[float]] = {}
    random = Random(seed)
    for count in load_counts(subject.catalogue.size) if loads else ():
        loading[count] = _load_times(subject, count, rounds, random)
        done()
    alone = MeasuredCosts(
        token_ms_by_rows={size: _ms(statistics.median(times) / size) for size, times in decoding.items() if times},
        prefill_token_ms=_ms(statistics.median(prefilling)),
        prompt_step_ms={rows: _ms(statistics.median(times)) for rows, times in sorted(reading.items()) if times},
        load_ms_by_experts={count: _ms(statistics.median(times)) for count, times in loading.items() if times},
        machine=machine_name(),
        expert_format=", ".join(subject.worker.pack.manifest.formats),
    )
    return structs.replace(alone, beside_prompts=share_beside(alone, both))


def share_beside(alone: MeasuredCosts, both: Sequence[tuple[int, int, float]]) -> float | None:
    """The median share of a decode step's time by which its rows made steps with prompts longer, from 0 to 1. ``both``:
    rows that decoded, rows of prompts, and the seconds of a step of them; None where there is none."""
    if not both or not alone.prompt_step_ms:
        return None
    steps = alone.steps()
    shares = [(1e3 * seconds - steps.step_ms(0, prompt)) / steps.step_ms(decode) for decode, prompt, seconds in both]
    return round(min(1.0, max(0.0, statistics.median(shares))), 4)


def turns_of(subject: Subject, rounds: int) -> int:
    """How often ``measure_costs`` calls ``done``."""
    sizes = row_counts(subject.engine.config.max_running)
    a_round = len(sizes) + 1 + len(_prompt_sizes(subject)) + len(_mixtures(subject))
    return rounds * a_round + len(load_counts(subject.catalogue.size))


def _decode_times(subject: Subject, asked: Sequence[Asked], steps: int) -> list[float]:
    """Seconds of each step that decodes a row of every sequence; empty where not all of them fit at once."""
    engine, stats = subject.engine, subject.engine.stats
    times: list[float] = []
    in_a_step = min(engine.config.prefill_chunk or engine.config.tokens_per_step, engine.config.tokens_per_step)
    until_all_decode = len(asked) + sum(len(one.prompt_ids) for one in asked) // in_a_step
    for place, one in enumerate(asked):
        room = engine.max_model_len - len(one.prompt_ids)
        limit = min(room, until_all_decode + _WARM_STEPS + steps)
        request = request_of(one, limit, ignore_eos=True, name=f"turn-{place}")
        engine.add(engine.new_sequence(request, lambda _: None))
    deadline = time.perf_counter() + _BUDGET_S
    warm = 0
    while engine.busy and len(times) < steps and (not times or time.perf_counter() < deadline):
        prefilled, decoded = stats.prefill_rows, stats.decode_rows
        started = time.perf_counter()
        subject.step()
        took = time.perf_counter() - started
        if stats.prefill_rows == prefilled and stats.decode_rows - decoded == len(asked):
            warm += 1
            if warm > _WARM_STEPS:
                times.append(took)
    _end_all(subject)
    return times


def _prefill_time(subject: Subject, asked: Sequence[Asked]) -> float:
    """Seconds a token of prompts that come one by one."""
    tokens = 0
    spent = 0.0
    for one in asked[: subject.engine.config.max_running]:
        subject.engine.add(subject.engine.new_sequence(request_of(one, 1), lambda _: None))
        started = time.perf_counter()
        while subject.engine.busy:
            subject.step()
        spent += time.perf_counter() - started
        tokens += len(one.prompt_ids)
        if spent > _BUDGET_S:
            break
    return spent / max(1, tokens)


def _prompt_sizes(subject: Subject) -> list[int]:
    return prompt_row_counts(subject.engine.config.tokens_per_step)


def _mixtures(subject: Subject) -> list[tuple[int, int]]:
    """Rows that decode and rows of prompts, of steps that have both."""
    config = subject.engine.config
    decodes = sorted({max(1, config.max_running // share) for share in (8, 4, 2)})
    prompts = sorted({max(1, config.tokens_per_step // share) for share in (20, 8, 4)})
    return [(decode, prompt) for decode in decodes for prompt in prompts if decode < config.max_running]


def crowd_of(subject: Subject, asked: Sequence[Asked], rows: int) -> list[Asked]:
    """Prompts that have so many tokens together, the last one cut; fewer where no more prompts may run at once."""
    config = subject.engine.config
    found: list[Asked] = []
    left = rows
    for place in range(config.max_running):
        one = asked[place % len(asked)]
        taken = min(len(one.prompt_ids), left, config.prefill_chunk or left)
        found.append(replace(one, prompt_ids=one.prompt_ids[:taken]))
        left -= taken
        if not left:
            break
    return found


def _reading_times(subject: Subject, crowd: Sequence[Asked], rows: int) -> list[float]:
    """Seconds of steps in which these prompts are read and each has its only token. The first makes what is kept for so
    many rows, and is left out. None where the engine did not take all of them at once."""
    engine, stats = subject.engine, subject.engine.stats
    times: list[float] = []
    deadline = time.perf_counter() + _BUDGET_S / 2
    while len(times) <= _READINGS and (len(times) < 2 or time.perf_counter() < deadline):
        for place, one in enumerate(crowd):
            engine.add(engine.new_sequence(request_of(one, 1, name=f"crowd-{place}"), lambda _: None))
        before = stats.prefill_rows
        started = time.perf_counter()
        subject.step()
        times.append(time.perf_counter() - started)
        if stats.prefill_rows - before != rows or engine.busy:
            _end_all(subject)
            return []
    return times[1:]


def _mixed_times(subject: Subject, asked: Sequence[Asked], decode: int, prompt: int) -> list[tuple[int, int, float]]:
    """Rows that decoded, rows of prompts and seconds of steps that have both, about so many of each."""
    engine, stats = subject.engine, subject.engine.stats
    for place in range(decode):
        one = asked[place % len(asked)]
        room = engine.max_model_len - len(one.prompt_ids)
        request = request_of(one, min(room, decode + _WARM_STEPS + _READINGS + 1), ignore_eos=True, name=f"d-{place}")
        engine.add(engine.new_sequence(request, lambda _: None))
    while engine.waiting:
        subject.step()
    crowd = crowd_of(subject, asked[::-1], prompt)[: engine.config.max_running - decode]
    found = []
    for turn in range(_READINGS):
        for place, one in enumerate(crowd):
            engine.add(engine.new_sequence(request_of(one, 1, name=f"c-{turn}-{place}"), lambda _: None))
        read, decoded = stats.prefill_rows, stats.decode_rows
        started = time.perf_counter()
        subject.step()
        took = time.perf_counter() - started
        read, decoded = stats.prefill_rows - read, stats.decode_rows - decoded
        if turn and read and decoded:
            found.append((decoded, read, took))
    _end_all(subject)
    return found


def _load_times(subject: Subject, count: int, rounds: int, random: Random) -> list[float]:
    """Seconds in which ``count`` experts, drawn at random, are loaded. Room for them was made before."""
    experts = subject.worker.experts
    times: list[float] = []
    deadline = time.perf_counter() + _BUDGET_S
    while len(times) < 2 * rounds + 1 and (not times or time.perf_counter() < deadline):
        absent = np.flatnonzero(~experts.device.resident).tolist()
        resident = experts.resident_keys().tolist()
        leaving = random.sample(resident, min(count, len(resident)))
        _evict(subject, leaving)
        coming = random.sample(absent, count) if len(absent) >= count else leaving[:count]
        started = time.perf_counter()
        loaded = experts.preload(coming)
        if loaded < count:
            break
        times.append(time.perf_counter() - started)
    return times


def _evict(subject: Subject, keys: Sequence[int]) -> None:
    """Through the policy: its target is what is resident, without ``keys``."""
    experts, policy = subject.worker.experts, subject.policy
    wanted = np.array(experts.device.resident)
    wanted[list(keys)] = False
    policy.target = Target(0, wanted, drop_others=True)
    none = np.empty(0, dtype=np.float32)
    experts.predicted(Prediction(PredictionRequest("none", (0, 0)), "", none))  # the engine reads the target now
    policy.target = None
    experts.layer_entered(0)
    if experts.device.resident[list(keys)].any():
        raise ProfileFailed("experts that are not wanted stay on the device: a defect of greenroom")


def _end_all(subject: Subject) -> None:
    for number in [*subject.engine.waiting, *subject.engine.running]:
        subject.engine.cancel(number)


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 5)
