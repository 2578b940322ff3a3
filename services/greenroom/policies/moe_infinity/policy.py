"""MoE-Infinity: prefetching and caching by the activation of each running sequence (sections 5 and 6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.activation_matrix import Rows, tokens_by_expert
from greenroom.policies.base.array_types import NO_KEYS, Keys, Mask, Scores
from greenroom.policies.base.events import (
    Artifact,
    LayerRouting,
    Reason,
    SequenceEnd,
    SequenceInfo,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Prefetch
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.moe_infinity.eamc import EAMC, Eamc, NearestMembers
from greenroom.policies.moe_infinity.replacement import EPSILON, ActivationRetention

RECALL: Final = "prefetch_recall"
Asked = int | tuple[bytes, bytes] | None


class MoeInfinity(ExpertPolicy):
    """Prefetches what the nearest prior activation matrix predicts for later layers; keeps what running sequences use.

    When a layer is routed, its tokens are added to the matrix of each sequence, and the nearest member of the EAMC is
    found anew. Then every expert of a later layer has the priority (p + ε) · (1 − (fl − l) / L). p is the share of the
    layer's tokens that the member gives the expert, summed over the running sequences (Algorithm 1).
    ``ActivationRetention`` chooses the victims (Algorithm 2). But an expert that was fetched ahead stays until it is
    used or no longer predicted. The EAMC comes as the artifact ``eamc``; without one the policy only caches.

    Our reading: experts with p = 0 only fill free slots. A prefetch displaces no expert that was fetched ahead and is
    still predicted. Nor does it displace one whose own priority, counted on into the next step, is as high.
    ``literal``: every wanted expert displaces the victim of Algorithm 2. ``refine`` False: one prediction a step, after
    the first router (§8.3). ``priorities`` False: all later experts are wanted alike, in the order in which Algorithm 1
    submits them, and none is compared with its victim (§8.3). ``by_ratio`` and ``by_layer`` are the retention's.
    """

    artifacts = frozenset({EAMC})

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        literal: bool = False,
        refine: bool = True,
        priorities: bool = True,
        by_ratio: bool = True,
        by_layer: bool = True,
    ) -> None:
        super().__init__(catalogue)
        self.retention = ActivationRetention(catalogue, by_ratio=by_ratio, by_layer=by_layer)
        self.version = ""
        """The version of the EAMC in use."""
        self._literal = literal
        self._refine = refine
        self._priorities = priorities
        self._compares = priorities and not literal  # a prefetch with its victims
        self._step: Step | None = None  # the newest
        self._used: Mask = np.zeros(catalogue.size, dtype=np.bool_)  # experts with p > 0
        self._nearest: NearestMembers | None = None
        # [tier, N]: experts fetched there ahead, and since then neither used, given up, nor brought on to the device.
        self._ahead: Mask = np.zeros((2, catalogue.size), dtype=np.bool_)
        self._any_ahead = False  # False: certainly none
        self._decays = _layer_decays(catalogue)
        self._round = _round_decays(catalogue)
        self._layer = 0
        self._asked: Asked = None  # which members for which sequences ``_shares`` is of
        self._shares: Scores = np.zeros(catalogue.size, dtype=np.float32)  # p
        self._lifted = self._shares  # p + ε
        self._by_layer: list[Scores | None] = []  # by running layer: its priorities, once computed
        self._recall = _Recall()
        self._top_k: list[int] = catalogue.top_k.tolist()

    def prepare(self, artifact: Artifact) -> Artifact:
        if artifact.kind != EAMC or artifact.prepared is not None:
            return artifact
        return replace(artifact, prepared=Eamc.of_artifact(self.catalogue, artifact))

    # -- events ----------------------------------------------------------------------------------------------------

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        """Ignores an artifact of another kind or shape, which its sender has reported."""
        if artifact.kind != EAMC:
            return
        try:
            eamc = self.prepare(artifact).prepared
        except InvalidConfig:
            return
        assert isinstance(eamc, Eamc), "so it was prepared"
        self.version = artifact.version
        self._asked = None
        matrices = self.retention.matrices
        self._nearest = NearestMembers(eamc, matrices.room)
        rows = np.array(sorted(matrices.rows.values()), dtype=np.intp)
        if len(rows):
            for layer, span in enumerate(self.catalogue.spans):
                self._nearest.update(layer, rows, matrices.counts[rows, span])

    def on_layer_routed(self, routing: LayerRouting) -> None:
        nearest = self._nearest
        if self._any_ahead:
            self._ahead[:, routing.experts] = False
            self._any_ahead = bool(self._ahead.any())
        rows = self.retention.add(routing)
        if nearest is None or not len(rows):
            return
        self._predict(routing, rows, nearest)

    def _predict(self, routing: LayerRouting, rows: Rows, nearest: NearestMembers) -> None:
        """The look-up and the priorities that follow: what the policy does beyond caching."""
        layer = self._layer = routing.layer
        nearest.grow(self.retention.matrices.room)
        if routing.step.rows == 1 and len(routing.experts) == self._top_k[layer]:
            self._follow_token(routing, int(rows[0]), nearest)
        else:
            self._follow(routing, rows, nearest)
        if self._refine or routing.step is not self._step:
            self._step = routing.step
            self._publish(self._foreseen(layer, nearest))
        elif self.prefetch is not None:
            self._publish(np.where(self._decays[layer] > 0, self.prefetch.priority, np.float32(0)))

    def on_sequence_preempted(self, sequence: SequenceInfo) -> None:
        self.on_sequence_ended(sequence.sequence, SequenceEnd.CANCELLED)

    def on_sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        row = self.retention.end(sequence)
        self._recall.end(sequence)
        if row is not None and self._nearest is not None and row < len(self._nearest.nearest):
            self._nearest.clear(row)

    def on_transfer_done(self, transfer: Transfer) -> None:
        expert, tier = transfer.expert, transfer.target
        if transfer.reason is not Reason.PREFETCH or tier is Tier.DISK or self.prefetch is None:
            return
        if tier is Tier.DEVICE:
            self._ahead[Tier.HOST, expert] = False
        if self._used[expert] and self.prefetch.priority[expert] > 0:  # else its layer waited for it, or ran without
            self._ahead[tier, expert] = self._any_ahead = True

    def on_evicted(self, tier: Tier, experts: Keys) -> None:
        if tier is not Tier.DISK:
            self._ahead[tier, experts] = False

    # -- questions -------------------------------------------------------------------------------------------------

    def victims(self, request: VictimRequest) -> Keys:
        worth, tie = self.retention.worth(request.tier)
        if self._any_ahead:
            worth = np.where(self._ahead[request.tier], worth + (1 + worth.max()), worth)
        victims = lowest(self.catalogue, request, worth, tie)
        if request.tier is Tier.DEVICE and request.reason is Reason.PREFETCH and self._compares:
            return NO_KEYS if self._dearer(victims, request.incoming) else victims
        return victims

    def fill_order(self) -> Keys:
        """Layer after layer (§6.1)."""
        return np.arange(self.catalogue.size)

    def report(self, sequence: int) -> Mapping[str, float]:
        recall = self._recall.of(sequence)
        return {} if recall is None else {RECALL: recall}

    # -- Algorithm 1, steps 16 to 26 -------------------------------------------------------------------------------

    def _follow(self, routing: LayerRouting, rows: Rows, nearest: NearestMembers) -> None:
        """Find the nearest members anew: steps 16 to 21."""
        start, added = self.catalogue.spans[routing.layer].start, tokens_by_expert(routing)
        keys = added.experts + start
        self._recall.note(routing.step.sequences.tolist(), added.owners,
                          nearest.eamc.ranks[nearest.nearest[rows][added.owners], keys])  # fmt: skip
        counts = self.retention.matrices.counts[rows[added.owners], keys]
        nearest.add(routing.layer, rows, added, counts)

    def _follow_token(self, routing: LayerRouting, row: int, nearest: NearestMembers) -> None:
        """The same for one token of one sequence, the most frequent case."""
        keys = routing.experts
        ranks = nearest.eamc.ranks[nearest.nearest[row]].take(keys)
        self._recall.add(int(routing.step.row_sequences[0]), int(np.count_nonzero(ranks < len(keys))), len(keys))
        counts = self.retention.matrices.counts[row].take(keys)
        nearest.add_token(routing.layer, row, keys - self.catalogue.spans[routing.layer].start, counts)

    def _foreseen(self, layer: int, nearest: NearestMembers) -> Scores:
        """``[N]``: every expert's priority."""
        self._ask_members(nearest)
        priority = self._by_layer[layer]
        if priority is None:
            decays = self._decays[layer]
            priority = self._lifted * decays if self._priorities else (decays > 0).astype(np.float32)
            self._by_layer[layer] = priority
        return priority

    def _ask_members(self, nearest: NearestMembers) -> None:
        """Take the sum of the nearest members' shares. It seldom changes from one layer to the next."""
        rows = list(self.retention.matrices.rows.values())
        if len(rows) == 1 and not self.catalogue.decoder_start:
            member = int(nearest.nearest[rows[0]])
            if self._asked != member:
                self._take(member, nearest.eamc.ratios[member])
            return
        eamc, members = nearest.eamc, nearest.nearest[rows]
        encoding = self.retention.encodes[rows] if self.catalogue.decoder_start else None
        these = members.tobytes(), b"" if encoding is None else encoding.tobytes()
        if these == self._asked:
            return
        shares: Scores = eamc.ratios[members[0]] if len(members) == 1 else eamc.ratios[members].sum(axis=0)
        if encoding is not None:
            encoder = self.retention.encoder
            shares = shares.copy()
            shares[encoder] = eamc.ratios[members[encoding], encoder].sum(axis=0)
        self._take(these, shares)

    def _take(self, asked: Asked, shares: Scores) -> None:
        """Use ``shares`` from now on, of other members or for other sequences."""
        self._asked = asked
        self._shares, self._used, self._lifted = shares, shares > 0, shares + np.float32(EPSILON)
        self._by_layer = [None] * self.catalogue.layers
        if self._any_ahead:
            self._ahead &= self._used

    def _publish(self, priority: Scores) -> None:
        generation = 0 if self.prefetch is None else self.prefetch.generation + 1
        self.prefetch = Prefetch(generation, priority, None if self._literal else self._used)

    def _dearer(self, victims: Keys, incoming: Keys) -> bool:
        """Whether a victim was fetched ahead, or has as high a priority as an incoming expert."""
        decays, shares = self._round[self._layer], self._shares
        least = (shares[incoming] * decays[incoming]).min(initial=np.inf)
        return bool(self._ahead[Tier.DEVICE, victims].any() or (shares[victims] * decays[victims] >= least).any())


def _round_decays(catalogue: Catalogue) -> NDArray[np.float32]:
    """``[layers, N]``: by running layer, 1 − d / (L + 1) for experts whose layer's next turn is d layers ahead."""
    ahead = (catalogue.layer_of - np.arange(catalogue.layers)[:, None] - 1) % catalogue.layers + 1
    decays: NDArray[np.float32] = (1 - ahead / (catalogue.layers + 1)).astype(np.float32)
    return decays


def _layer_decays(catalogue: Catalogue) -> NDArray[np.float32]:
    """``[layers, N]``: by running layer l, 1 − (fl − l) / L for the experts of every later layer fl; else 0."""
    after = catalogue.layer_of - np.arange(catalogue.layers)[:, None]
    decays: NDArray[np.float32] = np.where(after > 0, 1 - after / catalogue.layers, 0).astype(np.float32)
    return decays


class _Recall:
    """By sequence, the share of its used experts that were predicted.

    In a layer that used n experts, the nearest member's n likeliest were predicted. Whether a link brings them in time
    does not count.
    """

    def __init__(self) -> None:
        self._seen: dict[int, list[int]] = {}
        self._ended: tuple[int, float] | None = None

    def note(self, sequences: Sequence[int], owners: Rows, ranks: NDArray[np.int16]) -> None:
        """``ranks[m]``: the rank of an expert that the sequence ``owners[m]`` used, by the member that was nearest
        before this layer was known."""
        counts = np.bincount(owners, minlength=len(sequences))
        hits = np.bincount(owners[ranks < counts[owners]], minlength=len(sequences))
        for sequence, found, count in zip(sequences, hits.tolist(), counts.tolist(), strict=True):
            if count:
                self.add(sequence, found, count)

    def add(self, sequence: int, found: int, count: int) -> None:
        """Count a layer in which ``found`` of ``count`` used experts were predicted."""
        of = self._seen.setdefault(sequence, [0, 0])
        of[0] += found
        of[1] += count

    def end(self, sequence: int) -> None:
        found = self._seen.pop(sequence, None)
        self._ended = None if found is None else (sequence, found[0] / found[1])

    def of(self, sequence: int) -> float | None:
        """The recall of ``sequence`` if it was the last to end, else None. Answers once."""
        ended, self._ended = self._ended, None
        return ended[1] if ended is not None and ended[0] == sequence else None
