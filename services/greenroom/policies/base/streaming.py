"""Through how many slots a layer passes its missing experts, where the policy ``streams``."""

from __future__ import annotations

from typing import Final

_SLOTS_A_PASSAGE: Final = 48
"""Least time on gpt-oss-20b's routing with a third of the experts resident, prompts of 200 rows."""


def stream_slots(moving: int, slots: int) -> int:
    """As many as keep every link busy while one more is computed, or a share of all ``slots``.

    ``moving``: how many experts the links move at once. Some experts take longer to compute than to move, which more
    slots even out; each of them costs about one load a layer.
    """
    return max(1 + moving, slots // _SLOTS_A_PASSAGE)
