"""Which experts were resident when the process last stopped, so that the next start loads these first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from greenroom.core.files import write_whole
from greenroom.policies.base.array_types import Keys
from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target


@dataclass(frozen=True, slots=True)
class _Remembered:
    """``experts``: (layer, index) pairs."""

    experts: list[tuple[int, int]]
    version: int = 1


class ResidentSetFile:
    """Lies beside the pack. It is a hint only: a file that is missing, unreadable or of other shapes is no error."""

    def __init__(self, pack: Path) -> None:
        self.path = pack.with_suffix(".resident.json")

    def load(self, catalogue: Catalogue) -> list[int]:
        """Keys, in the order in which they were saved; empty where the file can not be used."""
        try:
            remembered = msgspec.json.decode(self.path.read_bytes(), type=_Remembered)
            return [catalogue.key(layer, index) for layer, index in remembered.experts]
        except (OSError, msgspec.MsgspecError, IndexError):
            return []

    def save(self, catalogue: Catalogue, keys: Iterable[int]) -> None:
        """A reader sees the old or the new file. A full disk is no error."""
        experts = [(int(catalogue.layer_of[key]), int(catalogue.index_of[key])) for key in keys]
        with contextlib.suppress(OSError):
            write_whole(self.path, msgspec.json.encode(_Remembered(experts)))


def first_residents(
    catalogue: Catalogue, remembered: Sequence[int], target: Target | None = None, order: Keys | None = None
) -> list[int]:
    """All keys: first those that the policy wants on the device, then the remembered ones, then the others in the
    policy's ``order``. Without an order: expert 0 of every layer, expert 1 of every layer, and so on."""
    wanted = [] if target is None or target.tier is not Tier.DEVICE else np.flatnonzero(target.wanted).tolist()
    known = dict.fromkeys([*wanted, *remembered])
    others = (np.lexsort((catalogue.layer_of, catalogue.index_of)) if order is None else order).tolist()
    return [*known, *(key for key in others if key not in known)]
