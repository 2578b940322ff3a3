"""Routing paths in a replay: what foretells them is driven as a batch loop drives it."""

from __future__ import annotations

import itertools

from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.replay.traces.steps import NO_TOKENS, TraceStep


class ReplayedPaths:
    """Asks ``source`` for the rows of steps whose tokens were recorded (None: nothing foretells)."""

    def __init__(self, source: TokenPaths | None) -> None:
        self._source = source

    def of(self, step: TraceStep) -> Scores | None:
        """``[T, N]``: those of a step's rows, before it runs; what starts with it begins. None: they are not known."""
        if self._source is None or step.tokens is None or step.positions is None:
            return None
        prompts: itertools.chain[Ids] = itertools.chain(step.prompts, itertools.repeat(NO_TOKENS))
        for sequence, prompt in zip(step.started, prompts, strict=False):
            self._source.begin(sequence, prompt)
        return self._source.chances(step.sequences, step.positions, step.tokens)

    def ran(self, step: TraceStep) -> None:
        """The step has run; sequences of which it had the last rows end."""
        if self._source is None or step.tokens is None or step.positions is None:
            return
        self._source.picked(step.sequences, step.positions, step.picks)
        for sequence in step.ended:
            self._source.end(sequence)
