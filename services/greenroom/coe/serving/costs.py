"""What an executor's work takes, by architecture: measured by the profiler, or quickly at the start."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from PIL import Image

from greenroom.coe.computing.batch_size import batch_size, bytes_of_batch
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input
from greenroom.coe.computing.profiled_costs import executor_costs
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.expert_checkpoint import InputKind
from greenroom.coe.serving.unprofiled_memory import LARGE, unprofiled_bytes
from greenroom.core.coe_profile import CoeProfile
from greenroom.core.errors import BudgetTooSmall, CorruptCheckpoint, GreenroomError, InvalidRequest, PackError
from greenroom.core.units import format_bytes
from greenroom.experts.copying.device_errors import raise_if_fatal
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.placement.placement_policy import Costs

log = logging.getLogger(__name__)

KIND: Final = "cpu"
"""Of executors, as profiles call it."""
MOST_UNPROFILED: Final = 16
_LEAST_MS: Final = 1e-3
_SAMPLE_SIZE: Final = (224, 224)


@dataclass(frozen=True, slots=True)
class ExecutorCosts:
    """What one executor's work takes. ``costs``: CoServe's K, B and loading, by expert (section 4.2).

    ``most[N]``: by expert, from where on larger batches are no faster a request (section 4.4).
    ``bytes_by_batch[N]``: by expert, bytes of intermediates by the requests of a batch.
    """

    costs: Costs
    most: Sequence[int]
    bytes_by_batch: Sequence[Mapping[int, int]]

    def limited(self, most: int | None) -> ExecutorCosts:
        """With no batches larger than that."""
        return self if most is None else replace(self, most=[min(one, most) for one in self.most])

    def intermediates(self) -> int:
        """Bytes that the largest batch of any expert takes."""
        return max(bytes_of_batch(own, most) for own, most in zip(self.bytes_by_batch, self.most, strict=True))

    def least_intermediates(self) -> int:
        """Bytes that one request of the most demanding expert takes."""
        return max(bytes_of_batch(own, 1) for own in self.bytes_by_batch)

    def largest_batches(self, names: Sequence[str], intermediates: int) -> dict[int, int]:
        """By expert, the most requests in a batch of an executor with so many bytes for intermediates.

        Raises BudgetTooSmall, naming the expert for which not even one request fits.
        """
        found = {}
        for expert, (name, own, most) in enumerate(zip(names, self.bytes_by_batch, self.most, strict=True)):
            found[expert] = batch_size(most, intermediates, own, most)
            if not found[expert]:
                raise BudgetTooSmall(
                    f"an executor has {format_bytes(intermediates)} for intermediates, and one request of expert "
                    f"{name!r} takes {format_bytes(bytes_of_batch(own, 1))}: lower --expert-share or --executors, or "
                    "raise --expert-memory"
                )
        return found


def profiled(profile: CoeProfile, names: Sequence[str], executors: int) -> ExecutorCosts:
    """As `greenroom coe profile` has measured it, with so many executors. No time is zero."""
    own = profile.of_kind(KIND)
    keys = [profile.experts[name] for name in names]
    costs = executor_costs(profile, names, KIND, executors)
    return ExecutorCosts(
        replace(
            costs,
            request_ms_by_expert=_above_zero(costs.request_ms_by_expert),
            batch_ms_by_expert=_above_zero(costs.batch_ms_by_expert),
            load_ms_by_expert=_above_zero(costs.load_ms_by_expert),
        ),
        [own.times(key, executors).most for key in keys],
        [own.architectures[key].bytes_by_batch for key in keys],
    )


def measure_quickly(
    collaboration: Collaboration,
    computer: ExpertComputer,
    pack: PackFile,
    progress: Callable[[], object] | None = None,
) -> ExecutorCosts:
    """One batch of 1 and one of 8 an architecture, and how fast its records are read. No time is zero.

    The samples are noise of 224 pixels and a short text. Memory is that of the longest text, and of the image of which
    the expert's processor makes most (``unprofiled_bytes``). ``progress``: called once
    an architecture. Raises CorruptCheckpoint, naming file and expert, if one can not compute a sample; PackError,
    OSError if no record of an architecture can be read.
    """
    request_ms: dict[int, float] = {}
    batch_ms: dict[int, float] = {}
    taken: dict[int, dict[int, int]] = {}
    seconds, nbytes = 0.0, 0
    for experts in collaboration.of_architecture().values():
        expert, weights, took_s = _read_one(collaboration, pack, experts)
        seconds, nbytes = seconds + took_s, nbytes + pack.layout(expert).nbytes
        one, many = ([sample_input(collaboration, expert)] * count for count in (1, LARGE))
        with _named(collaboration, expert):
            computer.compute(expert, one, weights)  # the first one makes what later ones use
            alone, together = _ms(computer, expert, one, weights), _ms(computer, expert, many, weights)
        for alike in computer.prepared_alike(experts):
            with _named(collaboration, alike[0]):
                sample = sample_input(collaboration, alike[0], computer.largest(alike[0]))
                taken |= dict.fromkeys(alike, unprofiled_bytes(computer, alike[0], sample, weights))
        each = max(_LEAST_MS, (together - alone) / (LARGE - 1))
        for key in experts:
            request_ms[key], batch_ms[key] = each, max(_LEAST_MS, alone - each)
        if progress is not None:
            progress()
    load_ms = [max(_LEAST_MS, size * 1000.0 * seconds / nbytes) for size in pack.manifest.sizes()]
    count = len(load_ms)
    return ExecutorCosts(
        Costs(
            token_ms=max(request_ms.values()),
            batch_ms=max(batch_ms.values()),
            load_ms_by_expert=dict(enumerate(load_ms)),
            request_ms_by_expert=request_ms,
            batch_ms_by_expert=batch_ms,
        ),
        [MOST_UNPROFILED] * count,
        [taken[key] for key in range(count)],
    )


def try_each(
    collaboration: Collaboration,
    computer: ExpertComputer,
    pack: PackFile,
    progress: Callable[[], object] | None = None,
) -> None:
    """One sample through one expert of every architecture, where nothing needs to be measured.

    Raises as ``measure_quickly``. An output that is no finite number is said in the log and fails nothing here: it
    fails that expert's requests alone.
    """
    for experts in collaboration.of_architecture().values():
        expert, weights, _ = _read_one(collaboration, pack, experts)
        with _named(collaboration, expert):
            (outcome,) = computer.compute(expert, [sample_input(collaboration, expert)], weights)
            if isinstance(outcome, InvalidRequest):
                raise outcome
        if isinstance(outcome, GreenroomError):
            log.error("%s: experts.%s: %s", collaboration.file, collaboration.graph.names[expert], outcome)
        if progress is not None:
            progress()


@contextlib.contextmanager
def _named(collaboration: Collaboration, expert: int) -> Iterator[None]:
    """What is raised while the expert computes a sample is a CorruptCheckpoint of its name."""
    try:
        yield
    except Exception as error:  # settings are untrusted, so a processor or model may raise anything
        raise_if_fatal(error)
        raise CorruptCheckpoint(
            f"{collaboration.file}: experts.{collaboration.graph.names[expert]}: it can not compute a sample, so "
            f"no request either: {type(error).__name__}: {error!s:.300}; its config.json or the settings of its "
            "processor or tokenizer do not fit the model"
        ) from error


def _read_one(collaboration: Collaboration, pack: PackFile, experts: Sequence[int]) -> tuple[int, ExpertWeights, float]:
    """The first of these, all of one architecture, whose record can be read; its weights; the seconds that took.

    A damaged record is said in the log. It fails those that need it, not the start. Raises PackError, OSError if none
    can be read.
    """
    layout = pack.layout(experts[0])
    record = page_aligned(layout.nbytes)
    record[:] = bytes(len(record))  # fresh pages cost as much as reading them
    failure: Exception | None = None
    for expert in experts:
        begun = time.perf_counter()
        try:
            pack.read_into(expert, 0, record)
        except (PackError, OSError) as error:
            log.error(
                "%s: experts.%s can not be read: %s", collaboration.file, collaboration.graph.names[expert], error
            )
            failure = failure or error
        else:
            took_s = time.perf_counter() - begun
            return expert, layout.views(torch.frombuffer(record, dtype=torch.uint8)), took_s
    assert failure is not None, "an architecture has an expert"
    raise failure


def sample_input(collaboration: Collaboration, expert: int, size: tuple[int, int] | None = None) -> Input:
    """Something that the expert can judge: noise, always the same. ``size``: an image's width and height."""
    if collaboration.experts[expert].takes is InputKind.TEXT:
        return "a part of the board that may be turned or missing"
    width, height = size or _SAMPLE_SIZE
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _above_zero(times: Mapping[int, float]) -> dict[int, float]:
    return {expert: max(_LEAST_MS, ms) for expert, ms in times.items()}


def _ms(computer: ExpertComputer, expert: int, batch: Sequence[Input], weights: ExpertWeights) -> float:
    begun = time.perf_counter()
    computer.compute(expert, batch, weights)
    return 1000.0 * (time.perf_counter() - begun)
