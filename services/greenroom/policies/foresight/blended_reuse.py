"""Reuse, with the next layers' chances from several predictors, blended by a fit."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.path_file import LAYERS_AHEAD
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Keys, Scores
from greenroom.policies.base.events import (
    ROUTER,
    Artifact,
    LayerRouting,
    Phase,
    Prediction,
    PredictionRequest,
    Step,
)
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.foresight.blend import Blend, blended, missed
from greenroom.policies.foresight.path_predictor import PathPredictor
from greenroom.policies.foresight.path_weights import PATH, PathWeights
from greenroom.policies.prefetching.prefetching_policy import PrefetchingPolicy
from greenroom.policies.reuse.policy import Reuse

Logits = NDArray[np.float32]

_ROWS = 4
"""Rows of a step that the blends learn from."""
_LESSON_EVERY = 24
"""They learn from every so-many-th layer, of each step others: their weights change slowly. Of a model with fewer
layers from about one a step."""
_LEAST = 1e-4

_START = {1: 1.0, 2: 0.7, 3: 0.5}
"""By how many predictors have answered: the weight of each before anything was seen."""

Has = tuple[bool, bool, bool]
"""Which have answered: the path, the router, the tokens."""


class BlendedReuse(Reuse):
    """``Reuse``, with better chances for the next two layers.

    The chance that a decoding row picks an expert comes from a blend of up to three logits: that of its path through
    the layers before (``PathPredictor``) with what ``reuse`` knows of its sequence; that of the layer's own router run
    ahead, where there is one; and that which was foretold of its token before the forward (``Step.row_paths``), where
    the class ``reads_tokens``. A blend learns online how far to believe each. In a batch an expert is wanted with
    1 − Π(1 − p) over the rows.

    A layer that misses many passes them through a few slots, and who stays is chosen among all residents and all that
    pass. In a step with prompts only the next layer's experts are wanted ahead.
    """

    only_ahead = True

    reads_tokens: ClassVar[bool] = False

    def __init__(self, catalogue: Catalogue, *, layers: int = 2, least: float = 0.5, evict: bool = True) -> None:
        """Raises InvalidConfig for values out of range."""
        if not 1 <= layers <= LAYERS_AHEAD:
            raise InvalidConfig("layers", layers, f"from 1 to {LAYERS_AHEAD}")
        super().__init__(catalogue, layers=layers, least=least, evict=evict)
        self._lesson_every = min(_LESSON_EVERY, catalogue.layers)
        self._weights: PathWeights | None = None
        self._blends: dict[tuple[int, int, Has], Blend] = {}
        """By layer, how many layers ahead it was foreseen, and which had answered."""
        ends = [min(layer + 1 + layers, catalogue.layers) for layer in range(catalogue.layers)]
        asked = [int(catalogue.first[end] - catalogue.first[layer + 1]) for layer, end in enumerate(ends)]
        self._block: list[int] = [0, *np.cumsum(asked).tolist()]
        """By the layer that asks, where the columns of the experts that it asks about begin."""
        self._blended: dict[Has, Logits] = {}
        """The blends' weights and biases, ``[predictors + 1, columns]``, once these predictors have answered."""
        self._path = PathPredictor()
        self.predictors = (self._path,)
        self._path_request: PredictionRequest | None = None
        self._from_paths: Logits | None = None  # [decoding rows, M], with what is known of the sequences
        self._from_routers: Logits | None = None  # [T, M]
        self._from_tokens: Logits | None = None  # [T, N]
        self._of_sequences: Logits | None = None  # [decoding rows, N], from the step's first answer on
        self._told: dict[tuple[int, int], tuple[Has, tuple[Logits, ...]]] = {}  # by layer, layers ahead
        self._step = self._rows = 0
        self._part = slice(0, catalogue.size)  # of the experts, that the step's prompts run through
        self._decoding: NDArray[np.intp] = np.empty(0, dtype=np.intp)
        self._sequences: Ids = np.empty(0, dtype=np.int64)

    def prepare(self, artifact: Artifact) -> Artifact:
        if artifact.kind != PATH:
            return super().prepare(artifact)
        return replace(artifact, prepared=PathWeights.of_artifact(self.catalogue, artifact))

    def on_artifact_swapped(self, artifact: Artifact) -> None:
        if artifact.kind == PATH:
            weights = artifact.prepared
            if not isinstance(weights, PathWeights):
                try:
                    weights = PathWeights.of_artifact(self.catalogue, artifact)
                except InvalidConfig:
                    return  # its sender has reported it
            self._weights = weights
            self._path.use(weights, artifact.version)
        else:
            super().on_artifact_swapped(artifact)

    def on_step_started(self, step: Step) -> None:
        super().on_step_started(step)
        self._told.clear()
        self._from_paths = self._from_routers = self._from_tokens = self._of_sequences = None
        self._path_request = None
        if self.reads_tokens and step.row_paths is not None:
            self._from_tokens = _logit(step.row_paths)
        self._step = step.number
        self._rows = step.rows
        self._decoding = np.flatnonzero(step.row_phases == Phase.DECODE)
        self._sequences = step.row_sequences[self._decoding]
        if self._has_prompts:
            self._part = self._part_of(step)
            if self._from_tokens is None:
                self._expect_prompts(step.rows - len(self._decoding))

    @property
    def _has_prompts(self) -> bool:
        return len(self._decoding) < self._rows

    def _part_of(self, step: Step) -> slice:
        """The keys of the layers that prompts' rows of ``step`` run through."""
        decoder_start = self.catalogue.decoder_start
        begin = int(self.catalogue.first[decoder_start])
        encodes = decoder_start > 0 and bool((step.row_phases == Phase.ENCODE).any())
        return slice(0, begin) if encodes else slice(begin, self.catalogue.size)

    def _expect_prompts(self, rows: int) -> None:
        """Each of ``rows`` picks an expert with the share that all sequences' tokens do: many rows leave no doubt.

        In an encoder-decoder a prompt's rows run through one part.
        """
        part = self._part
        self.reuse.expect(part, 1 - (1 - self.reuse.chances.soon[part]) * self._not_by_prompts(rows)[part])

    def _not_by_prompts(self, rows: int) -> NDArray[np.float64]:
        """``[N]``: the chance that none of ``rows`` prompt rows picks an expert."""
        found: NDArray[np.float64] = np.ones(self.catalogue.size)
        found[self._part] = (1 - self.reuse.chances.over_all[self._part].astype(np.float64)) ** rows
        return found

    def _want_later(self, layer: int) -> None:
        """In a step with prompts only for the next layer. What that layer misses comes while this one's last experts
        compute; anything further would push out what is certain to be used before it.
        """
        if not self._has_prompts:
            super()._want_later(layer)
            return
        span = self.catalogue.spans[min(layer + 1, self.catalogue.layers - 1)]
        priority: Scores = np.zeros(self.catalogue.size, dtype=np.float32)
        chance = self.reuse.expected()[span]
        if self._part.start <= span.start < self._part.stop:
            priority[span] = chance * (chance >= self._least) * self._decays[layer][span]
        if self._wants_any or priority.any():
            self._want(priority)

    def streams(self, routing: LayerRouting, missing: Keys) -> bool:
        """Always (§5.2): it evicts by the chance of a next use, whichever layer is running."""
        return True

    def on_layer_routed(self, routing: LayerRouting) -> None:
        PrefetchingPolicy.on_layer_routed(self, routing)
        layer = self._layer = routing.layer
        if self._told:
            self._learn(routing)
        self._from_paths = self._from_routers = None
        self._asked = self._path_request = None
        last = min(layer + 1 + self._layers, self.catalogue.layers)
        if layer + 1 < last:
            self._asked = PredictionRequest(ROUTER, (layer + 1, last), step=routing.step.number)
            self._ask(self._asked)
            if len(self._decoding) and self._weights is not None:
                self._path_request = PredictionRequest(PATH, (layer + 1, last), step=routing.step.number)
                self._ask(self._path_request)
                if self._path.answers_at(routing):
                    return  # what is wanted is decided once, with that answer
            if ROUTER in self.answered_at_once:
                return
        self._want_later(layer)

    def on_prediction(self, prediction: Prediction) -> None:
        if prediction.request is not self._asked and prediction.request is not self._path_request:
            return  # late, or the answer to another request
        start, stop = prediction.request.layers
        rows = self._rows if prediction.request is self._asked else len(self._decoding)
        if prediction.values.shape[:-1] != (rows,):
            return  # of other rows than it was asked about
        if prediction.request is self._asked:
            self._from_routers = _logit(prediction.values)
        else:
            self._from_paths = self._with_sequences(prediction.values, start, stop)
            if self._from_routers is None and ROUTER in self.answered_at_once:
                return  # decided once, with what the routers say
        self._expect(start, stop)

    def _with_sequences(self, values: Logits, start: int, stop: int) -> Logits:
        """A path's logits of the layers ``[start, stop)``, and what ``reuse`` knows of the rows' sequences.

        No layer of them has been routed in this step, so that is what was known when the step began.
        """
        assert self._weights is not None
        if self._of_sequences is None:
            self._of_sequences = self.reuse.chances.logits(self._sequences)
        keys = slice(self.catalogue.spans[start].start, self.catalogue.spans[stop - 1].stop)
        found = self._of_sequences[:, keys] * self._weights.sequence[self._weights.columns_of(self._layer, start, stop)]
        found += values
        return found

    def _expect(self, start: int, stop: int) -> None:
        """Tell the retention what all answers to this layer's requests together foresee, and want by it."""
        paths, routers, decoding = self._from_paths, self._from_routers, self._decoding
        mixed = len(decoding) < self._rows
        spans = self.catalogue.spans
        keys = slice(spans[start].start, spans[stop - 1].stop)
        tokens = None if self._from_tokens is None else self._from_tokens[:, keys]
        has = (paths is not None, routers is not None, tokens is not None)
        of_rows = [each for each in (routers, tokens) if each is not None]
        given = tuple(each[decoding] if mixed else each for each in of_rows)
        if paths is not None:
            given = (paths, *given)
        columns = self._columns(self._layer, start, stop)
        none = np.multiply.reduce(missed(blended(self._weights_of(has)[:, columns], *given)), axis=0)
        if mixed and not of_rows:
            none *= self._not_by_prompts(self._rows - len(decoding))[keys]
        elif mixed:
            prompts = (np.delete(each, decoding, axis=0) for each in of_rows)
            weights = self._weights_of((False, *has[1:]))[:, columns]
            none *= np.multiply.reduce(missed(blended(weights, *prompts)), axis=0)
        for layer in range(start, stop) if len(decoding) else ():
            if (layer + self._step) % self._lesson_every == 0:
                own = slice(spans[layer].start - keys.start, spans[layer].stop - keys.start)
                self._told[layer, layer - self._layer] = has, tuple(each[:_ROWS, own] for each in given)
        self.reuse.expect(keys, 1 - none)
        self._want_later(self._layer)

    def _weights_of(self, has: Has) -> Logits:
        """``[predictors + 1, columns]``, of the blends of those that have answered."""
        if has not in self._blended:
            count = sum(has)
            start = np.array([*(_START[count],) * count, 0], dtype=np.float32)
            self._blended[has] = np.tile(start[:, None], self._block[-1])
        return self._blended[has]

    def _columns(self, asked_at: int, start: int, stop: int) -> slice:
        """Of the blended weights, those of the experts of layers ``[start, stop)``, foreseen at layer ``asked_at``."""
        first = self.catalogue.first
        begin = int(self._block[asked_at] - first[asked_at + 1])
        return slice(begin + int(first[start]), begin + int(first[stop]))

    def _learn(self, routing: LayerRouting) -> None:
        for ahead in range(1, self._layers + 1):
            told = self._told.pop((routing.layer, ahead), None)
            if told is None or routing.picks is None or len(routing.picks) != routing.step.rows:
                continue
            has, logits = told
            picks = routing.picks[self._decoding[:_ROWS]]
            experts = int(self.catalogue.experts_per_layer[routing.layer])
            picked = np.zeros((len(picks), experts), dtype=np.bool_)
            rows, places = np.nonzero(picks < experts)
            picked[rows, picks[rows, places]] = True
            key = routing.layer, ahead, has
            blend = self._blends.get(key)
            if blend is None:
                blend = self._blends[key] = Blend((_START[sum(has)],) * sum(has), experts)
            blend.learn(picked, *logits)
            columns = self._columns(routing.layer - ahead, routing.layer, routing.layer + 1)
            weights = self._weights_of(has)
            weights[:-1, columns] = blend.weights[:, None]
            weights[-1, columns] = blend.bias


def _logit(weights: NDArray[np.float32]) -> Logits:
    """Of weights between 0 and 1; NaN counts as 0."""
    within = np.fmax(weights, np.float32(_LEAST))
    np.fmin(within, np.float32(1 - _LEAST), out=within)
    within /= 1 - within
    return np.log(within, out=within)
