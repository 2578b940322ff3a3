"""MoE-Infinity's replacement (Algorithm 2) on plain numbers, for ``greenroom.replay.quick``.

What is fetched ahead is a matter of time, so here an EAMC changes nothing and the retention is all of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from greenroom.policies.base.activation_matrix import TINY, ActivationMatrices, Matrix
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.policies.moe_infinity.retention import EPSILON, layer_decay
from greenroom.replay.rule import Group, Rule
from greenroom.replay.traces.steps import NO_KEY, TraceStep, keys_of


class LeastActivated(Rule):
    """A step's tokens change each layer by themselves: all layers' worth is worked out at once as the step begins, and
    a layer takes up its own as it is routed. Sums and quotients are those of the policy, to the bit.
    """

    def __init__(self, policy: MoeInfinity) -> None:
        catalogue, retention = policy.catalogue, policy.retention
        self._catalogue = catalogue
        self._matrices = ActivationMatrices(catalogue)
        self._decay = layer_decay(catalogue, by_layer=retention.by_layer)
        self._by_ratio = retention.by_ratio
        self._coming: Matrix = self._decay.copy()  # what everybody is worth by the step's end
        self._absent: Matrix = np.full(catalogue.size, np.inf, dtype=np.float32)  # 0 for residents
        self._worth: Matrix = np.full(catalogue.size, np.inf, dtype=np.float32)  # of residents alone
        self._by_layer = [(self._coming[span], self._absent[span], self._worth[span]) for span in catalogue.spans]

    def begin_step(self, step: TraceStep, layers: Sequence[Group]) -> None:
        alone = len(step.sequences) == 1
        rows = self._matrices.rows_of(step.sequences if alone else np.unique(step.sequences))
        counts = self._matrices.counts
        if alone:
            counts[rows[0], [expert for group in layers for expert in group]] += 1
        else:
            counts[rows] += self._tokens(step, len(rows))
        added = counts[rows]
        sums = np.add.reduceat(added, self._catalogue.first[:-1], axis=1)  # exact: of whole numbers
        np.maximum(sums, TINY, out=sums)
        if len(rows) == 1:
            sums = np.divide(1, sums, dtype=np.float64).astype(np.float32)
        of_experts = sums[:, self._catalogue.layer_of]
        self._matrices.ratios[rows] = added * of_experts if len(rows) == 1 else added / of_experts
        self._reckon()

    def route(self, layer: int, group: Group, missing: Group, leaving: int) -> Sequence[int]:
        absent, worth = self._absent, self._worth
        for expert in missing:
            absent[expert] = 0
        own = self._by_layer[layer]
        np.add(own[0], own[1], out=own[2])
        victims = []
        if leaving:
            for expert in group:
                worth[expert] = np.inf
            for _ in range(leaving):
                victim = int(worth.argmin())
                worth[victim] = absent[victim] = np.inf
                victims.append(victim)
            for expert in group:
                worth[expert] = self._coming[expert]
        return victims

    def end_step(self, step: TraceStep) -> None:
        for sequence in step.ended:
            self._matrices.end(sequence)
        if step.ended:
            self._reckon()
            np.add(self._coming, self._absent, out=self._worth)

    def _reckon(self) -> None:
        if self._by_ratio:
            self._matrices.ratios.sum(axis=0, out=self._coming)
            self._coming += np.float32(EPSILON)
            self._coming *= self._decay

    def _tokens(self, step: TraceStep, sequences: int) -> Matrix:
        """``[S, N]``: of each sequence, ascending, which experts this step's rows go to."""
        size, keys = self._catalogue.size, keys_of(self._catalogue, step)
        cells = np.unique(step.sequences, return_inverse=True)[1][:, None, None] * size + keys
        tokens = np.bincount(cells[keys != NO_KEY], minlength=sequences * size)
        return tokens.reshape(sequences, size).astype(np.float32)
