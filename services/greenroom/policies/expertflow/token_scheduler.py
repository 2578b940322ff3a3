"""ExpertFlow's token scheduler: rows whose routing paths share experts run together (section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Mask, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.batching.batch_policy import (
    BatchDecision,
    BatchPolicy,
    BatchState,
    Rows,
    RunningSequence,
    SequencePaths,
)
from greenroom.policies.batching.fcfs import planned
from greenroom.policies.batching.preemption import make_room
from greenroom.policies.batching.rounds import balanced_sizes, decoding, in_admission_order
from greenroom.policies.expertflow.grouping import expected_union, grouped


class TokenScheduler(BatchPolicy):
    """Groups the rows that decode by their routing paths, anew in each round.

    - Where one forward may hold all of them, one runs. Two are never expected to be sooner: what all rows together miss
      some group misses too, and a forward's fixed time comes twice. ``force`` makes two groups nonetheless.
    - Where ``BatchLimits.rows_per_forward`` does not let them, they run in as few forwards as it allows, of like sizes.
      The group that shares most with what is resident goes first. Where every expert is resident nothing is grouped.
    - No sequence that decodes misses a round. Prompts keep their order and run as under FcfsBatching, beside one of the
      groups: the one that shares most experts with the first of them, where its path is known, else the last. Where it
      has little room for them, they have a forward of their own.

    Without paths, or where one is missing, groups are fixed, in order of admission, as under FcfsBatching.
    ``literal``: groups as the paper makes them, by medoids alone. ``seed``: of the medoids that it starts from.
    """

    plans_rounds = True
    reads_paths = True
    without_paths = (
        "it groups nothing until routing paths are foretold: `greenroom paths fit` makes what foretells them"
    )

    def __init__(self, *, literal: bool = False, force: bool = False, seed: int = 0) -> None:
        if seed < 0:
            raise InvalidConfig("seed", seed, "0 or more")
        self._literal = literal
        self._force = force
        self._seed = seed

    def decide(self, state: BatchState) -> BatchDecision:
        state, preempt = make_room(state)
        decision = self._planned(state)
        return replace(decision, preempt=preempt) if preempt else decision

    def _planned(self, state: BatchState) -> BatchDecision:
        running = decoding(state)
        most = state.limits.decode_rows
        if self._force and len(running) > 1:
            most = min(most, -(-len(running) // 2))
        sizes = balanced_sizes(len(running), most)
        paths = _chances(state.paths, running)
        all_resident = state.resident is not None and bool(state.resident.all())
        if len(sizes) < 2 or paths is None or all_resident:
            return planned(state, in_admission_order(running, state.limits.decode_rows))
        groups = grouped(paths, sizes, literal=self._literal, seed=self._seed)
        unions = [expected_union(paths[group]) for group in groups]
        order = _most_resident_first(unions, state.resident)
        plans = [[Rows(running[row].sequence, 1, Phase.DECODE) for row in groups[place].tolist()] for place in order]
        return planned(state, plans, _beside([unions[place] for place in order], state))


def _chances(paths: SequencePaths | None, running: Sequence[RunningSequence]) -> Scores | None:
    """``[R, N]``: the paths of these sequences, in their order. None: one is not known."""
    if paths is None:
        return None
    wanted = [each.sequence for each in running]
    told = paths.sequences.tolist()
    if told == wanted:
        return paths.chances
    row_of = {sequence: row for row, sequence in enumerate(told)}
    if not all(sequence in row_of for sequence in wanted):
        return None
    return paths.chances[[row_of[sequence] for sequence in wanted]]


def _most_resident_first(unions: Sequence[Scores], resident: Mask | None) -> list[int]:
    """The order of the groups: those that are expected to need most of what is resident first."""
    places = range(len(unions))
    if resident is None:
        return list(places)
    return sorted(places, key=lambda place: -float(unions[place] @ resident))


def _beside(unions: Sequence[Scores], state: BatchState) -> int:
    """Which group prompts join: the one that shares most with the first of them, if its path is known."""
    prompts = [each.sequence for each in state.running if each.phase is Phase.PREFILL]
    prompts += [each.sequence for each in state.waiting[:1]]
    if state.paths is None or not prompts:
        return -1
    row = np.flatnonzero(state.paths.sequences == prompts[0])
    if not len(row):
        return -1
    return int(np.argmax([union @ state.paths.chances[row[0]] for union in unions]))
