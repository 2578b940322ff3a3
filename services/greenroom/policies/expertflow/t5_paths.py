"""Routing paths from a small T5: ExpertFlow's predictor as printed (section 3.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import FIRST_TOKEN, T5, UNKNOWN, shape_of
from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.logistic import chances_of
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.expertflow.t5_cache import MOST_SEQUENCES, T5Cache
from greenroom.policies.expertflow.t5_network import UNSEEN, Array, T5Network, attend, merged, normed
from greenroom.policies.expertflow.token_tables import Past

CACHE_BYTES: Final = 64 * MIB


class T5Paths(TokenPaths):
    """The encoder reads a prompt once, when its sequence is first asked for; the decoder reads the rows' tokens.

    Each sequence has a cache of the window's keys and values. All caches are within ``cache_bytes``. A sequence that
    lost its place to others goes on with its prompt, without its earlier tokens. Where ``past`` tells what a sequence
    has picked so far, and the file has weights for it, both are combined; where it is NaN, only tokens count.
    """

    def __init__(
        self,
        file: PathsFile,
        catalogue: Catalogue,
        past: Past | None = None,
        *,
        vocabulary: int | None = None,
        cache_bytes: int = CACHE_BYTES,
        window: int | None = None,
    ) -> None:
        """``vocabulary``: how many token ids the model knows. ``window``: at most the one that the file was trained
        with; 1 is the printed "sequence length 1 in decoding", without context.

        Raises InvalidConfig for a file of another form, model or vocabulary, for a window that is none, and for
        ``cache_bytes`` that hold no sequence.
        """
        if file.form != T5:
            raise InvalidConfig("form", file.form, T5)
        file.check_model(tuple(catalogue.experts_per_layer.tolist()), vocabulary)
        shape = shape_of(file.tensors)
        if window is not None and not 1 <= window <= shape.window:
            raise InvalidConfig("window", window, f"from 1 to {shape.window}, with which it was trained")
        shape = shape if window is None else shape._replace(window=window)
        self.version = str(file.version)
        self._known = file.tensors["tokens"].astype(np.int64)
        self._network = T5Network(shape, {name: file.tensors[name] for name in shape.weights(0, 0)})
        self._cache = T5Cache(shape, cache_bytes)
        self._prompts: OrderedDict[int, Ids] = OrderedDict()
        self._past = past if "past.weights" in file.tensors else None
        if self._past is not None:
            self._popularity: Scores = file.tensors["past.popularity"]
            self._bias: Scores = file.tensors["past.bias"]
            self._weights: Scores = file.tensors["past.weights"][:, catalogue.layer_of]

    @property
    def nbytes(self) -> int:
        """Weights and caches, these when they are full."""
        return self._network.nbytes + self._cache.nbytes

    @property
    def lost(self) -> int:
        """How often a running sequence's cache had to make room."""
        return self._cache.lost

    def begin(self, sequence: int, prompt: Ids) -> None:
        self._cache.leave(sequence)
        self._prompts.pop(sequence, None)
        if len(self._prompts) == MOST_SEQUENCES:
            self._prompts.popitem(last=False)
        self._prompts[sequence] = self._rows_of(prompt[-self._network.shape.prompt :])

    def end(self, sequence: int) -> None:
        self._cache.leave(sequence)
        self._prompts.pop(sequence, None)

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        rows = self._rows_of(tokens)
        found = np.empty((len(rows), len(self._network.head_bias)), dtype=np.float32)
        for together in self._together(sequences):
            slots = np.array([self._slot(int(sequences[one[0]])) for one in together], dtype=np.intp)
            places = np.array(together, dtype=np.intp)
            found[places] = self._decode(slots, positions[places], rows[places])
        if self._past is not None:
            self._add_past(found, sequences, rows)
        return chances_of(found)

    def _add_past(self, logits: Scores, sequences: Ids, rows: Ids) -> None:
        distinct, of_row = np.unique(sequences, return_inverse=True)
        past = None if self._past is None else self._past(distinct)
        if past is None:
            return
        untold = np.asarray(np.isnan(past).all(axis=1))
        told = np.flatnonzero(~untold[of_row])
        known, weights = past[of_row[told]] - self._popularity, self._weights
        known[np.isnan(known)] = 0
        own = (logits[told] - self._popularity) * weights[0]
        own += known * weights[1]
        unknown = rows[told] == UNKNOWN
        own[unknown] += known[unknown] * weights[2]
        logits[told] = own + (self._popularity + self._bias)

    def _together(self, sequences: Ids) -> Iterator[list[NDArray[np.intp]]]:
        """Rows that are decoded at once: of sequences with one row each, or of one sequence, as its cache has room."""
        if not len(sequences):
            return
        order = np.argsort(sequences, kind="stable")
        groups = np.split(order, np.flatnonzero(np.diff(sequences[order])) + 1)
        single = [group for group in groups if len(group) == 1]
        for start in range(0, len(single), self._cache.slots):
            yield single[start : start + self._cache.slots]
        window = self._network.shape.window
        for group in groups:
            if len(group) > 1:
                for start in range(0, len(group), window):
                    yield [group[start : start + window]]

    def _rows_of(self, tokens: Ids) -> Ids:
        """Where each token lies in the embedding."""
        known = self._known
        if not len(known):
            return np.full(len(tokens), UNKNOWN, dtype=np.int64)
        place = np.minimum(np.searchsorted(known, tokens), len(known) - 1)
        return np.where(known[place] == tokens, place + FIRST_TOKEN, UNKNOWN).astype(np.int64)

    def _slot(self, sequence: int) -> int:
        slot = self._cache.find(sequence)
        if slot is not None:
            return slot
        prompt = self._prompts.get(sequence)
        if prompt is None or not len(prompt):
            prompt = np.array([UNKNOWN], dtype=np.int64)
        network = self._network
        return self._cache.take(sequence, network.cross_keys_values(network.encode(prompt)))

    def _decode(self, slots: NDArray[np.intp], positions: Ids, rows: Ids) -> Array:
        """Logits ``[B, T, N]`` of rows ``[B, T]`` of the embedding."""
        network, cache = self._network, self._cache
        places = cache.place(slots, positions)
        used, prompt = cache.used(positions), int(cache.prompt_lengths[slots].max())
        kept = _whole(slots)
        ago = positions[:, :, None] - cache.positions[kept][:, None, :used]
        window = network.shape.window
        ago[(ago < 0) | (ago >= window)] = window
        bias = np.moveaxis(network.decoder_bias[:, ago], 0, 1)  # [B, H, T, used]
        beyond = np.arange(prompt) >= cache.prompt_lengths[kept][:, None]
        prompt_bias = np.where(beyond, UNSEEN, np.float32(0))[:, None, None]
        states = network.embedding[rows]
        for layer, block in enumerate(network.decoder):
            own, cross = block.own, block.cross
            assert cross is not None
            seen = normed(states, own.norm)
            keys, values = network.split(seen @ own.key_value)
            cache.keys[layer][slots[:, None], places] = keys
            cache.values[layer][slots[:, None], places] = values
            query = network.heads(seen @ own.query)
            keys, values = cache.keys[layer][kept][:, :used], cache.values[layer][kept][:, :used]
            states += merged(attend(query, network.heads(keys), network.heads(values), bias)) @ own.out
            query = network.heads(normed(states, cross.norm) @ cross.query)
            keys, values = cache.prompt_keys[layer][kept][:, :prompt], cache.prompt_values[layer][kept][:, :prompt]
            states += merged(attend(query, network.heads(keys), network.heads(values), prompt_bias)) @ cross.out
            states = block.feed_forward(states)
        return network.logits(states)


def _whole(slots: NDArray[np.intp]) -> NDArray[np.intp] | slice:
    """A slice where they lie side by side, which copies nothing."""
    first = int(slots[0])
    alike = len(slots) == 1 or bool((np.diff(slots) == 1).all())
    return slice(first, first + len(slots)) if alike else slots
