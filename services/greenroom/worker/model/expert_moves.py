"""How long an engine's transfers take, for the batch loop."""

from __future__ import annotations

from greenroom.experts.copying.disk_calibration import MeasuredLink
from greenroom.experts.engine import ExpertEngine
from greenroom.policies.base.array_types import Mask


class EngineMoves:
    """ExpertMoves of an engine. ``link``: its disk as measured before; None: that was not measured."""

    def __init__(self, experts: ExpertEngine, link: MeasuredLink | None) -> None:
        self._experts = experts
        self._disk_bytes_per_s = None if link is None else link.bytes_per_s

    @property
    def stall_seconds(self) -> float:
        return self._experts.counters.stall_seconds

    def missing_seconds(self) -> float | None:
        return self._experts.missing_seconds(self._disk_bytes_per_s)

    def resident(self) -> Mask:
        return self._experts.device.resident
