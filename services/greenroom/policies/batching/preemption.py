"""Who gives up its KV memory where the running sequences need more than there is: the same under every batch policy."""

from __future__ import annotations

from dataclasses import replace

from greenroom.policies.batching.batch_policy import BatchState

MOST_PREEMPTIONS = 2
"""How often a sequence may be preempted. One that was so often reserves all that it may need, and never grows."""


def make_room(state: BatchState) -> tuple[BatchState, tuple[int, ...]]:
    """What is left to decide on, and the sequences that are preempted for it.

    Where the next rows of all running sequences fit, it is ``state``, and nobody is preempted. Else those give up their
    KV that lose least by it, of equal ones the one admitted last, until the next rows of the others fit. The one that
    was admitted longest ago is never preempted, nor one that was preempted MOST_PREEMPTIONS times. Where that is not
    enough, the last admitted of those that grow have no row now: they are left out of ``running``. Nobody starts then.

    Nobody waits forever. Those that may not be preempted hold all that they need, except the one admitted longest ago:
    they run to their ends, and what they give back is its before anybody else's.
    """
    wanted, free = sum(state.growing.values()), state.kv_free
    if wanted <= free:
        return state, ()
    growing = dict(state.growing)
    preempted = []
    places = {running.sequence: place for place, running in enumerate(state.running)}
    may = [running for running in state.running[1:] if running.preempted < MOST_PREEMPTIONS]
    for running in sorted(may, key=lambda one: (one.loss, -places[one.sequence])):
        if wanted <= free:
            break
        preempted.append(running.sequence)
        free += running.kv_held
        wanted -= growing.pop(running.sequence, 0)
    gone = set(preempted)
    for running in state.running:
        needed = 0 if running.sequence in gone else growing.get(running.sequence, 0)
        if needed > free:
            gone.add(running.sequence)
        else:
            free -= needed
    left = tuple(running for running in state.running if running.sequence not in gone)
    return replace(state, waiting=(), running=left, kv_free=free, kv_expected=0, growing={}), tuple(preempted)
