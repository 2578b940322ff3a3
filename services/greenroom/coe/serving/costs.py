"""What an executor's work takes, by architecture: measured by the profiler, or quickly at the start."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import numpy as np
import torch
from msgspec import Meta
from PIL import Image

from greenroom.coe.computing.batch_size import batch_size, bytes_of_batch
from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Input
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.coe.loading.collaboration import Collaboration
from greenroom.coe.loading.expert_checkpoint import InputKind
from greenroom.core.errors import BudgetTooSmall, InvalidConfig
from greenroom.core.units import format_bytes
from greenroom.experts.pack.direct_io import page_aligned
from greenroom.experts.pack.pack_file import PackFile
from greenroom.policies.placement.placement_policy import Costs

MOST_UNPROFILED: Final = 16
_LARGE: Final = 8
_LEAST_MS: Final = 1e-3
_SAMPLE_PIXELS: Final = 224

Positive = Annotated[float, Meta(gt=0)]


class ArchitectureCosts(msgspec.Struct, frozen=True, kw_only=True):
    """``request_ms``, ``batch_ms``: CoServe's K and B (section 4.2). ``bytes_by_batch``: intermediates, by requests.
    ``most``: from where on larger batches are no faster a request (section 4.4)."""

    request_ms: Positive
    batch_ms: Positive
    bytes_by_batch: Annotated[dict[int, Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    most: Annotated[int, Meta(ge=1)] = MOST_UNPROFILED


class CollaborationCosts(msgspec.Struct, frozen=True, kw_only=True):
    """``architectures``: by the key that the experts' checkpoints name. ``load_ms_by_byte``: of the disk link."""

    architectures: dict[str, ArchitectureCosts]
    load_ms_by_byte: Positive

    @classmethod
    def read(cls, file: Path, collaboration: Collaboration) -> CollaborationCosts:
        """Out of JSON, in which there may be more. Raises InvalidConfig."""
        try:
            found = msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise InvalidConfig("profile", str(file), f"it is no profile of a collaboration: {error}") from error
        for name, expert in zip(collaboration.graph.names, collaboration.experts, strict=True):
            if expert.architecture not in found.architectures:
                raise InvalidConfig(
                    "profile", str(file), f"it knows no architecture of expert {name!r}; profile this collaboration"
                )
        return found


def costs_of(costs: CollaborationCosts, collaboration: Collaboration, sizes: Sequence[int]) -> Costs:
    """By expert. ``sizes[N]``: bytes of the experts' records."""
    of = [costs.architectures[expert.architecture] for expert in collaboration.experts]
    return Costs(
        request_ms_by_expert={key: one.request_ms for key, one in enumerate(of)},
        batch_ms_by_expert={key: one.batch_ms for key, one in enumerate(of)},
        load_ms_by_expert={key: size * costs.load_ms_by_byte for key, size in enumerate(sizes)},
    )


def largest_batches(
    costs: CollaborationCosts, collaboration: Collaboration, intermediate_bytes: int, most: int | None = None
) -> dict[int, int]:
    """By expert, the most requests of a batch of an executor that has so many bytes for intermediates.

    ``most``: a limit beside that of the profile. Raises BudgetTooSmall, naming the expert for which not even one fits.
    """
    found = {}
    for key, (name, expert) in enumerate(zip(collaboration.graph.names, collaboration.experts, strict=True)):
        own = costs.architectures[expert.architecture]
        limit = own.most if most is None else min(own.most, most)
        found[key] = batch_size(limit, intermediate_bytes, own.bytes_by_batch, limit)
        if not found[key]:
            least = bytes_of_batch(own.bytes_by_batch, 1)
            raise BudgetTooSmall(
                f"an executor has {format_bytes(intermediate_bytes)} for intermediates, and one request of expert "
                f"{name!r} takes {format_bytes(least)}: raise --expert-memory or lower --expert-share or --executors"
            )
    return found


def all_intermediates(costs: CollaborationCosts, most: int | None = None) -> int:
    """What the largest batch of any architecture takes."""
    return max(
        bytes_of_batch(one.bytes_by_batch, one.most if most is None else min(one.most, most))
        for one in costs.architectures.values()
    )


def measure_quickly(
    collaboration: Collaboration,
    computer: ExpertComputer,
    pack: PackFile,
    progress: Callable[[], object] | None = None,
) -> CollaborationCosts:
    """One batch of 1 and one of 8 an architecture, and how fast its records are read. Never zero.

    The samples are noise of 224 pixels and a short text. ``progress``: called once an architecture.
    """
    found: dict[str, ArchitectureCosts] = {}
    seconds, nbytes = 0.0, 0
    for architecture, experts in collaboration.of_architecture().items():
        expert = experts[0]
        layout = pack.layout(expert)
        record = page_aligned(layout.nbytes)
        record[:] = bytes(1) * len(record)  # fresh pages cost as much as reading them
        begun = time.perf_counter()
        pack.read_into(expert, 0, record)
        seconds, nbytes = seconds + time.perf_counter() - begun, nbytes + layout.nbytes
        weights = layout.views(torch.frombuffer(record, dtype=torch.uint8))
        one, many = ([sample_input(collaboration, expert)] * count for count in (1, _LARGE))
        computer.compute(expert, one, weights)  # the first one makes what later ones use
        alone, together = (_ms(lambda batch=batch: computer.compute(expert, batch, weights)) for batch in (one, many))
        request_ms = max(_LEAST_MS, (together - alone) / (_LARGE - 1))
        found[architecture] = ArchitectureCosts(
            request_ms=request_ms,
            batch_ms=max(_LEAST_MS, alone - request_ms),
            bytes_by_batch={len(batch): intermediate_bytes(computer, expert, batch, weights) for batch in (one, many)},
        )
        if progress is not None:
            progress()
    return CollaborationCosts(architectures=found, load_ms_by_byte=max(1e-9, 1000.0 * seconds / max(1, nbytes)))


def sample_input(collaboration: Collaboration, expert: int) -> Input:
    """Something that the expert can judge: noise, always the same."""
    if collaboration.experts[expert].takes is InputKind.TEXT:
        return "a part of the board that may be turned or missing"
    noise = np.random.default_rng(0).integers(0, 256, (_SAMPLE_PIXELS, _SAMPLE_PIXELS, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def _ms(compute: Callable[[], object]) -> float:
    begun = time.perf_counter()
    compute()
    return 1000.0 * (time.perf_counter() - begun)


