"""DuoServe-MoE as it is printed (§5.2, §5.3): ``duoserve:literal=true``."""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.expert_mlp_file import ExpertMlpFile
from greenroom.policies.base.array_types import NO_KEYS, Keys, Mask
from greenroom.policies.base.events import (
    LayerRouting,
    Phase,
    Prediction,
    PredictionRequest,
    Step,
    Tier,
    Transfer,
    VictimRequest,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import ExpertPolicy, Target
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.policies.base.victim_selection import lowest
from greenroom.policies.replacement.lru import Recency

EXPERT_MLP: Final = ExpertMlpFile.KIND
"""The kind of prediction and of artifact: ExpertMLP. Values are logits ``[T, M]`` for the rows of the step."""

Logits = NDArray[np.float32]


class LiteralDuoServe(ExpertPolicy):
    """Nothing is kept from layer to layer; the next layer's experts come into each slot as its expert has run.

    *Answers* (§5.3). A step's first layer is fetched on demand. While a layer runs, ExpertMLP foresees the next one's
    picks: the top-k by probability. An expert that was wrongly foreseen makes room for one that was not. With several
    rows an expert is wanted with 1 − Π(1 − p), and as many are as these sum up to: at least top-k, at most the slots
    that its experts can be in. The paper has single requests only.

    *Prompts* (§5.2). A layer's experts pass through the slots in ascending order, fetched and computed in step. The
    first expert of the next layer, and of a step's first one, comes while slots are left. Nothing is predicted. A step
    with any prompt row goes by this.

    The paper has as many slots as the router's top-k. With more nothing is kept either: what has run and is not
    foreseen leaves at once, and the next layer's come sooner, into slots that are free. Where all experts fit and have
    been loaded, the engine asks no policy.
    """

    asks = frozenset({EXPERT_MLP})
    artifacts = frozenset({EXPERT_MLP})
    needs = frozenset({EXPERT_MLP})
    only_ahead = True
    slot_by_slot: ClassVar[bool] = True

    def __init__(self, catalogue: Catalogue) -> None:
        super().__init__(catalogue)
        self._sizes = SlotSizes(catalogue)
        self._places = self._sizes.places(catalogue.size)
        self._recency = Recency(catalogue.size)
        self._asked: PredictionRequest | None = None
        self._has_prompts = False
        self._rows = 0
        self._want(NO_KEYS)

    def on_budget_changed(self, tier: Tier, budget_bytes: int) -> None:
        if tier is Tier.DEVICE:
            self._places = self._sizes.places(self._sizes.within(budget_bytes))

    def on_step_started(self, step: Step) -> None:
        self._asked = None
        self._has_prompts = step.has_prompt_rows
        self._rows = step.rows
        if self._has_prompts:
            encodes = bool((step.row_phases == Phase.ENCODE).any())
            self._want_first_of(0 if encodes else self.catalogue.decoder_start)

    def on_layer_routed(self, routing: LayerRouting) -> None:
        self._recency.use(routing.experts)
        self._asked = None
        following = routing.layer + 1
        if following in (self.catalogue.layers, self.catalogue.decoder_start):
            self._want(NO_KEYS)
        elif self._has_prompts:
            self._want_first_of(following)
        else:
            self._want(NO_KEYS)
            self._asked = PredictionRequest(EXPERT_MLP, (following, following + 1), step=routing.step.number)
            self._ask(self._asked)

    def on_prediction(self, prediction: Prediction) -> None:
        """Ignores one that is late, and one of other rows than it was asked about."""
        request, experts = self._asked, 0
        if request is not None:
            experts = int(self.catalogue.experts_per_layer[request.layers[0]])
        if request is None or prediction.request is not request or prediction.values.shape != (self._rows, experts):
            return
        layer = request.layers[0]
        first = self.catalogue.first[layer]
        slots = int(self._places[self._sizes.class_of[first]])
        self._want(np.sort(foreseen(prediction.values, int(self.catalogue.top_k[layer]), slots)) + first)

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        return self._has_prompts

    def compute_order(self, routing: LayerRouting, resident: Mask) -> Keys | None:
        return np.sort(routing.experts) if self._has_prompts else None

    def victims(self, request: VictimRequest) -> Keys:
        """What is foreseen leaves last, and of the others what was used longest ago."""
        last = self._recency.last
        if request.tier is Tier.DEVICE and self.target is not None:
            last = np.where(self.target.wanted, last.max() + 1, last)
        return lowest(self.catalogue, request, last)

    def on_transfer_done(self, transfer: Transfer) -> None:
        self._recency.arrived(transfer)

    def _want_first_of(self, layer: int) -> None:
        self._want(self.catalogue.first[layer : layer + 1])

    def _want(self, keys: Keys) -> None:
        """Fetch these as slots are left, and evict all others that have run."""
        wanted = np.zeros(self.catalogue.size, dtype=np.bool_)
        wanted[keys] = True
        if self.target is None or (wanted != self.target.wanted).any():
            generation = 0 if self.target is None else self.target.generation + 1
            self.target = Target(generation, wanted, drop_others=True)


def foreseen(logits: Logits, top_k: int, slots: int) -> Keys:
    """The likeliest experts ``[n]`` of a layer, from each row's logits ``[T, E]``; NaN counts as never.

    Of one row ``top_k``; of several as many as their chances sum up to, if that is more, and no more than ``slots``.
    """
    doubt = np.logaddexp(0, np.where(np.isnan(logits), -np.inf, logits).astype(np.float64)).sum(axis=0)  # -ln Π(1 − p)
    count = top_k if len(logits) == 1 else max(top_k, round(float(-np.expm1(-doubt).sum())))
    return np.argsort(-doubt, kind="stable")[: min(count, slots)]
