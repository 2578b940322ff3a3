"""A small T5 in numpy, as far as an artifact of the form ``t5`` needs one (ExpertFlow, section 3.1.1).

Trained by transformers' T5, which this one equals to rounding. It is here a second time since policies know no torch,
and since the decoder's cache is to hold many sequences of unlike length within a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_forms.t5 import T5Shape

Array = NDArray[np.float32]

_EPSILON: Final = np.float32(1e-6)
UNSEEN: Final = np.float32(-1e9)
"""What is added to the score of what must not be attended to."""


class Attention(NamedTuple):
    """Matrices ``[in, out]``; ``key_value`` is those of keys and of values, side by side."""

    norm: Array
    query: Array
    key_value: Array
    out: Array


class Block(NamedTuple):
    """``cross``: None in the encoder."""

    own: Attention
    cross: Attention | None
    norm: Array
    widen: Array
    narrow: Array

    def feed_forward(self, states: Array) -> Array:
        """Adds to ``states``."""
        inner = normed(states, self.norm) @ self.widen
        np.maximum(inner, 0, out=inner)
        states += inner @ self.narrow
        return states


class T5Network:
    """The weights of a file, ready to compute with."""

    def __init__(self, shape: T5Shape, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.shape = shape
        self._tensors = {name: np.asarray(one, dtype=np.float32) for name, one in tensors.items()}
        self.embedding = self._tensors["shared.weight"]
        self.encoder = [self._block("encoder", layer) for layer in range(shape.encoder_layers)]
        self.decoder = [self._block("decoder", layer) for layer in range(shape.decoder_layers)]
        self.encoder_norm = self._tensors["encoder.final_layer_norm.weight"]
        self.decoder_norm = self._tensors["decoder.final_layer_norm.weight"]
        self.head, self.head_bias = self._matrix("head.weight"), self._tensors["head.bias"]
        self._encoder_bias = self._positions("encoder")
        self.decoder_bias = self._decoder_bias()

    @property
    def nbytes(self) -> int:
        """Of the weights in memory."""
        return sum(one.nbytes for one in self._tensors.values())

    # -- computing -------------------------------------------------------------------------------------------------

    def encode(self, prompt: NDArray[np.int64]) -> Array:
        """``[P, width]`` of the prompt's rows of the embedding, at least one."""
        states = self.embedding[prompt].copy()
        length, reach = len(prompt), self._encoder_bias.shape[1] // 2
        place = np.arange(length)
        distance = np.clip(place[None, :] - place[:, None], -reach, reach) + reach
        bias = self._encoder_bias[:, distance]  # [H, P, P]
        for block in self.encoder:
            own = block.own
            seen = normed(states, own.norm)
            keys, values = self.split(seen @ own.key_value)
            attended = attend(self.heads(seen @ own.query), self.heads(keys), self.heads(values), bias)
            states += merged(attended) @ own.out
            block.feed_forward(states)
        return normed(states, self.encoder_norm)

    def cross_keys_values(self, encoded: Array) -> list[tuple[Array, Array]]:
        """``[P, inside]`` each, for every layer of the decoder."""
        found = []
        for block in self.decoder:
            assert block.cross is not None
            found.append(self.split(encoded @ block.cross.key_value))
        return found

    @staticmethod
    def split(both: Array) -> tuple[Array, Array]:
        """Keys and values, of what ``key_value`` made."""
        inside = both.shape[-1] // 2
        return both[..., :inside], both[..., inside:]

    def heads(self, states: Array) -> Array:
        """``[.., H, T, key]`` of ``[.., T, H × key]``, a view."""
        found: Array = states.reshape(*states.shape[:-1], self.shape.heads, self.shape.key)
        return np.swapaxes(found, -3, -2)

    def logits(self, states: Array) -> Array:
        """``[.., N]``: z[l, e] of all layers at once (Eq. 3) of the decoder's states."""
        found: Array = normed(states, self.decoder_norm) @ self.head
        found += self.head_bias
        return found

    # -- weights ---------------------------------------------------------------------------------------------------

    def _matrix(self, name: str) -> Array:
        """``[in, out]``."""
        found: Array = np.ascontiguousarray(self._tensors[name].T)
        return found

    def _attention(self, prefix: str, name: str) -> Attention:
        query, key, value, out = (self._matrix(f"{prefix}.{name}.{part}.weight") for part in "qkvo")
        norm = self._tensors[f"{prefix}.layer_norm.weight"]
        return Attention(norm, query, np.concatenate([key, value], axis=1), out)

    def _block(self, stack: str, layer: int) -> Block:
        prefix = f"{stack}.block.{layer}.layer"
        cross = self._attention(f"{prefix}.1", "EncDecAttention") if stack == "decoder" else None
        last = f"{prefix}.{1 if cross is None else 2}"
        return Block(
            self._attention(f"{prefix}.0", "SelfAttention"),
            cross,
            self._tensors[f"{last}.layer_norm.weight"],
            self._matrix(f"{last}.DenseReluDense.wi.weight"),
            self._matrix(f"{last}.DenseReluDense.wo.weight"),
        )

    def _positions(self, stack: str) -> Array:
        """``[H, 2 reach + 1]``: what an attended token's distance adds, from ``reach`` before to ``reach`` behind."""
        shape = self.shape
        table = self._tensors[f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        distance = np.arange(-shape.reach, shape.reach + 1)
        found: Array = np.ascontiguousarray(table[buckets(distance, shape, both_ways=stack == "encoder")].T)
        return found

    def _decoder_bias(self) -> Array:
        """``[H, window + 1]``: by how many tokens ago; the last for what is out of the window."""
        ago = np.minimum(np.arange(self.shape.window), self.shape.reach)
        bias = self._positions("decoder")[:, self.shape.reach - ago]
        return np.concatenate([bias, np.full((len(bias), 1), UNSEEN, dtype=np.float32)], axis=1)


def buckets(distance: NDArray[np.int64], shape: T5Shape, *, both_ways: bool) -> NDArray[np.int64]:
    """The row of T5's table for tokens so far behind (negative: before) the one that attends (Raffel et al., 2.1).

    Half of the rows stand for one distance each, the others for spans that grow by a factor up to ``reach``.
    """
    rows = shape.buckets // 2 if both_ways else shape.buckets
    ahead = np.where(distance > 0, rows, 0) if both_ways else np.zeros_like(distance)
    far = np.abs(distance) if both_ways else np.maximum(-distance, 0)
    exact = rows // 2
    # In single precision, as the network that was trained has it: a border may lie on a whole number.
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact))
    grown = exact + (ratio / np.float32(math.log(shape.reach / exact)) * np.float32(rows - exact)).astype(np.int64)
    found: NDArray[np.int64] = ahead + np.where(far < exact, far, np.minimum(grown, rows - 1))
    return found


def normed(states: Array, weight: Array) -> Array:
    """Divided by the root of the mean square."""
    square = np.einsum("...i,...i->...", states, states, optimize=False) / np.float32(states.shape[-1])
    scaled: Array = states * (1 / np.sqrt(square + _EPSILON))[..., None]
    scaled *= weight
    return scaled


def attend(query: Array, keys: Array, values: Array, bias: Array) -> Array:
    """``[.., H, T, key]`` of queries alike, keys and values ``[.., H, S, key]``, and ``bias[.., H, T, S]``."""
    scores: Array = query @ np.swapaxes(keys, -1, -2)
    scores += bias
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    found: Array = scores @ values
    return found


def merged(heads: Array) -> Array:
    """``[.., T, H × key]`` of ``[.., H, T, key]``."""
    found = np.swapaxes(heads, -3, -2)
    return found.reshape(*found.shape[:-2], -1)
