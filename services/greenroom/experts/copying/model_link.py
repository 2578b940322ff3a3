"""The disk link of whole models, which several memories share."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from greenroom.experts.copying.byte_region import PiecedRecord
from greenroom.experts.copying.hardware import Hardware, RealHardware
from greenroom.experts.copying.scattered_reads import ScatteredJob, ScatteredReads, ScatteredStore
from greenroom.experts.pack.layout import PIECE_BYTES, RecordLayout
from greenroom.policies.base.events import Reason, Tier


class ModelLink:
    """The disk link that memories of whole models share, and the records that it brings.

    ``names`` and ``records``: by expert. Owned by one thread. ``on_posted``: called on a mover's thread when a read has
    ended, for an owner that waits for other things too.
    """

    def __init__(
        self,
        store: ScatteredStore,
        hardware: Hardware | None = None,
        on_posted: Callable[[], object] | None = None,
        *,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """``piece_bytes``: records are cut into pieces of at least so many bytes, where their layouts allow it.

        Raises ValueError for a pack of another kind.
        """
        hardware = hardware or RealHardware()
        layers = store.manifest.layers
        if any(layer.experts != 1 for layer in layers):
            raise ValueError("a pack of whole models has one expert a layer")
        distinct: dict[RecordLayout, PiecedRecord] = {}
        for layer in layers:
            if layer.layout not in distinct:
                distinct[layer.layout] = PiecedRecord(layer.layout, piece_bytes)
        self.names: tuple[str, ...] = tuple(layer.name for layer in layers)
        self.records: tuple[PiecedRecord, ...] = tuple(distinct[layer.layout] for layer in layers)
        self.closed = False
        self._outbox = hardware.outbox()
        self._outbox.on_posted = on_posted
        self._mover = hardware.mover("disk", ScatteredReads(store, hardware.reads), self._outbox)
        self._numbers = itertools.count()
        self._ended: dict[int, deque[ScatteredJob]] = {}

    def join(self) -> int:
        """The number of a new memory."""
        number = next(self._numbers)
        self._ended[number] = deque()
        return number

    def begin(self, memory: int, expert: int, pieces: tuple[memoryview, ...]) -> None:
        """Read the expert's record into these pieces, after what was begun before."""
        self._mover.put(
            ScatteredJob(expert, Tier.DISK, Tier.DEVICE, -1, -1, Reason.ON_DEMAND, pieces=pieces, memory=memory)
        )

    def ended(self, memory: int) -> list[ScatteredJob]:
        """This memory's reads that have ended since the last call, or failed (``error``). Does not wait.

        Raises ModelBroken if the mover has died.
        """
        for message in self._outbox.collect():
            assert isinstance(message, ScatteredJob)
            self._ended[message.memory].append(message)
        own = list(self._ended[memory])
        self._ended[memory].clear()
        return own

    def wait(self, timeout_s: float, memory: int | None = None) -> bool:
        """Wait until a read has ended that was not handed out yet. False: the time ran out.

        ``memory``: what waits to be handed out to others does not count, for they may not ask for it meanwhile.
        """
        waiting = any(self._ended.values()) if memory is None else bool(self._ended[memory])
        return waiting or self._outbox.wait(timeout_s)

    @property
    def bytes_moved(self) -> int:
        return self._mover.bytes_moved

    @property
    def busy_seconds(self) -> float:
        return self._mover.busy_seconds

    def close(self) -> None:
        """Stop after the reads that are under way. Raises TimeoutError if one does not end."""
        if not self.closed:
            self.closed = True
            self._mover.close()
