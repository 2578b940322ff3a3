"""Memory that holds whole models of any size, for executors that compute with them.

One memory for each executor, or one for all. Several share one ``ModelLink``. Nothing here waits except ``wait``,
``fill`` and ``close``: ``fetch`` begins a read, ``collect`` books what has landed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from greenroom.core.errors import BudgetTooSmall, GreenroomError, TransferFailed
from greenroom.core.units import format_bytes
from greenroom.experts.bookkeeping.byte_arena import ByteArena, Move
from greenroom.experts.bookkeeping.ledger import LedgerError
from greenroom.experts.copying.byte_region import ByteRegion
from greenroom.experts.copying.model_link import ModelLink
from greenroom.experts.copying.scattered_reads import ScatteredJob
from greenroom.experts.deciding.model_residency import ModelResidency
from greenroom.experts.pack.layout import PAGE_BYTES, ExpertWeights, PackManifest
from greenroom.policies.base.events import Reason
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy

TRANSFER_TIMEOUT_S = 60.0
"""How long is waited without anything landing."""


def catalogue_of_models(manifest: PackManifest, pool: str = "models") -> Catalogue:
    """The experts of a pack of whole models: expert i is layer i."""
    return Catalogue.of_models(pool, manifest.sizes())


class Landed(NamedTuple):
    """An expert has come, or has not (``error``): then requests that need it fail."""

    expert: int
    error: GreenroomError | None = None


class ModelMemory(ModelResidency):
    """At most ``nbytes`` of models under ``policy``. All of it is taken at once, and never more.

    Owned by one thread. Executors on other threads may compute with the weights of an expert while it is held.
    """

    def __init__(self, link: ModelLink, policy: ExpertPolicy, nbytes: int) -> None:
        """Raises BudgetTooSmall, naming the largest expert, if that does not fit."""
        sizes: list[int] = policy.catalogue.bytes_of.tolist()
        if sizes != [sum(record.pieces) for record in link.records]:
            raise ValueError(f"{policy.catalogue!r} is not that of the link's pack")
        largest = max(sizes)
        if nbytes < largest:
            name = link.names[sizes.index(largest)]
            raise BudgetTooSmall(
                f"an executor's expert memory has {format_bytes(nbytes)}, and expert {name} alone takes "
                f"{format_bytes(largest)}: give each executor at least that"
            )
        self._arena = ByteArena(nbytes // PAGE_BYTES * PAGE_BYTES)
        super().__init__(policy, self._arena, [record.pieces for record in link.records])
        self._region = ByteRegion(self.nbytes)
        self._link = link
        self._number = link.join()
        self._weights: dict[int, ExpertWeights] = {}  # of those that lie where they lay when these were made

    def weights(self, expert: int) -> ExpertWeights:
        """The tensors of a held expert in its layout's order: views of this memory, valid while it is held.

        Each is contiguous and begins at a multiple of 64 bytes. Raises LedgerError if the expert is not held.
        """
        if not self._held[expert]:
            raise LedgerError(f"the weights of expert {expert} are used, and it is not held")
        weights = self._weights.get(expert)
        if weights is None:
            weights = self._region.views(self._link.records[expert], self._arena.places(expert))
            self._weights[expert] = weights
        return weights

    def collect(self) -> list[Landed]:
        """Book what has ended since the last call. Returns what has come, and what has not.

        Raises ModelBroken if the mover has died.
        """
        ended = []
        for job in self._link.ended(self._number):
            error = self._error(job)
            if error is None:
                self.landed(job.expert)
            else:
                self.failed(job.expert, str(error))
            ended.append(Landed(job.expert, error))
        return ended

    def wait(self, timeout_s: float) -> bool:
        """Wait until a read on the link has ended, for whichever memory. False: the time ran out."""
        return self._link.wait(timeout_s)

    def fill(self, experts: Iterable[int], progress: Callable[[int], object] | None = None) -> list[Landed]:
        """Bring these before anything runs, in this order as far as they fit. The most wanted comes first.

        ``progress`` is told the bytes of each as it ends. Returns those that could not be brought. Raises
        TransferFailed if nothing ends for a minute, ModelBroken if the mover has died.
        """
        placed = self._place_first(experts)
        for expert in placed:
            self._begin(expert, (), ())
        lost: dict[int, Landed] = {}
        left = len(placed)
        while left:
            if not self._link.wait(TRANSFER_TIMEOUT_S, self._number):
                raise TransferFailed(f"{left} experts of the first fill have not come: the disk gives nothing")
            for job in self._link.ended(self._number):
                left -= 1
                if progress is not None:
                    progress(self._bytes_of[job.expert])
                if (error := self._error(job)) is not None:
                    self.failed(job.expert, str(error), Reason.FILL)
                    lost[job.expert] = Landed(job.expert, error)
        self._filled([expert for expert in placed if expert not in lost])
        return list(lost.values())

    def close(self) -> None:
        """Free the memory, once no read fills it: what is on its way is waited for, unless the link is closed.

        Raises TimeoutError if that does not end.
        """
        deadline = time.monotonic() + TRANSFER_TIMEOUT_S
        while self._coming and not self._link.closed:
            self.collect()
            left_s = max(0.0, deadline - time.monotonic())
            if self._coming and not self._link.wait(left_s, self._number):
                raise TimeoutError(f"{len(self._coming)} reads into an expert memory have not ended")
        self._weights.clear()
        del self._region

    def _begin(self, expert: int, left: Sequence[int], moves: Sequence[Move]) -> None:
        for gone in left:
            self._weights.pop(gone, None)
        for move in moves:
            self._weights.pop(move.owner, None)
            self._region.move(move.source, move.target, move.nbytes)
        pieces = self._link.records[expert].pieces
        self._link.begin(self._number, expert, self._region.buffers(self._arena.places(expert), pieces))

    def _error(self, job: ScatteredJob) -> GreenroomError | None:
        if job.error is None or isinstance(job.error, GreenroomError):
            return job.error
        return TransferFailed(
            f"expert {self._link.names[job.expert]} could not be read: {type(job.error).__name__}: {job.error}"
        )
