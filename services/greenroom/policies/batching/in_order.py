"""Who starts, in order of arrival: what the batch policies have in common."""

from __future__ import annotations

from collections.abc import Callable

from greenroom.policies.batching.batch_policy import BatchState, WaitingSequence

Refused = list[tuple[int, str]]


def admit_in_order(state: BatchState, take: Callable[[WaitingSequence], bool]) -> tuple[list[WaitingSequence], Refused]:
    """The waiting sequences that start, and those that can never be served, with the reason.

    ``take``: gives a sequence rows in the step, or says that there is no room for it. The first one that can not start
    blocks all behind it. One that needs more KV than there is in all is refused, so it blocks none.
    """
    admitted: list[WaitingSequence] = []
    refused: Refused = []
    kv_free, blocked = state.kv_free - state.kv_expected, False
    for waiting in state.waiting:
        if waiting.kv_need > state.limits.kv_total:
            reason = f"it needs {waiting.kv_need} of KV memory and there are {state.limits.kv_total} in all"
            refused.append((waiting.sequence, reason))
        elif not blocked:
            full = len(state.running) + len(admitted) >= state.limits.max_running
            blocked = full or waiting.kv_need > kv_free or not take(waiting)
            if not blocked:
                admitted.append(waiting)
                kv_free -= waiting.kv_need
    return admitted, refused
