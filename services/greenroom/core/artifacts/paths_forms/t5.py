"""The form ``t5``: a small T5 with a head for each layer of the model in place of the vocabulary's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB, format_bytes

T5: Final = "t5"

UNKNOWN: Final = 1
"""The row of the embedding for tokens that are not known. Row 0 fills batches up."""
FIRST_TOKEN: Final = 2
"""The row of the embedding for the first of ``tokens``."""

_LARGEST: Final[Mapping[str, int]] = {
    "width": 1024, "inner": 2048, "heads": 1024, "key": 1024, "encoder_layers": 8, "decoder_layers": 8,
    "buckets": 1024, "reach": 1024, "window": 512, "prompt": 1024,
}  # fmt: skip
"""Of each number of a shape: what a file says is what a process allocates."""
_WIDEST: Final = 1024
"""Heads times key."""
MAX_SEQUENCE_BYTES: Final = 4 * MIB
"""Of what the decoder keeps of one sequence: many run at once, and a cache of bounded size is to hold them."""
MAX_ATTENTION_BYTES: Final = 16 * MIB
"""Of scores. They take time whenever a sequence begins, however few numbers the file has."""


class T5Shape(NamedTuple):
    """``width``: of a token's state; ``inner``: of the feed-forward layers; ``key``: of a head's keys and values.

    ``buckets`` and ``reach``: of the relative positions, as T5 has them. ``window``: so many tokens of the sequence,
    the row's own among them, are attended to in the decoder; with 1 a row knows its token and the prompt alone.
    ``prompt``: so many last tokens of a prompt are read by the encoder.
    """

    width: int = 128
    inner: int = 256
    heads: int = 4
    key: int = 32
    encoder_layers: int = 1
    decoder_layers: int = 2
    buckets: int = 32
    reach: int = 128
    window: int = 64
    prompt: int = 128

    @property
    def inside(self) -> int:
        """Width of the keys, and of the values, of all heads."""
        return self.heads * self.key

    @property
    def ring(self) -> int:
        """Places for a sequence's tokens in the decoder's cache: half of them may be asked for again, and the window
        before is still there."""
        return 2 * self.window

    @property
    def sequence_bytes(self) -> int:
        """What the decoder keeps of one sequence: keys and values, and the position of each token."""
        return 2 * self.decoder_layers * self.inside * (self.ring + self.prompt) * 4 + 8 * (self.ring + 1)

    @property
    def attention_bytes(self) -> int:
        """Scores of all layers, for the longest prompt and for as many tokens as are decoded at once."""
        encoder = self.encoder_layers * self.prompt**2
        return 4 * self.heads * (encoder + self.decoder_layers * self.window * (self.ring + self.prompt))

    def check(self) -> None:
        """Raises InvalidConfig. What passes takes a bounded time and memory for a sequence, see ``MAX_..._BYTES``."""
        for name, value in self._asdict().items():
            if not 1 <= value <= _LARGEST[name]:
                raise InvalidConfig(f"shape.{name}", value, f"from 1 to {_LARGEST[name]:,}")
        if self.inside > _WIDEST:
            raise InvalidConfig("shape.heads", f"{self.heads} of {self.key}", f"at most {_WIDEST:,} in all")
        for what, size, most in (
            ("keys and values", self.sequence_bytes, MAX_SEQUENCE_BYTES),
            ("attention", self.attention_bytes, MAX_ATTENTION_BYTES),
        ):
            if size > most:
                allowed = f"at most {format_bytes(most)}: fewer layers, heads, or tokens of a window and a prompt"
                raise InvalidConfig("shape", f"{format_bytes(size)} of {what} for a sequence", allowed)
        if self.buckets < 4 or self.reach <= self.buckets // 2:
            found = f"{self.buckets} buckets, reach {self.reach}"
            raise InvalidConfig("shape.buckets", found, "at least 4, and a reach above half of them")

    def weights(self, tokens: int, experts: int) -> dict[str, tuple[int, ...]]:
        """The shape of every matrix by its name, which is transformers', for so many known tokens."""
        width, inside = self.width, self.inside
        found: dict[str, tuple[int, ...]] = {"shared.weight": (tokens + FIRST_TOKEN, width)}

        def attention(prefix: str, name: str) -> None:
            for part in "qkv":
                found[f"{prefix}.{name}.{part}.weight"] = (inside, width)
            found[f"{prefix}.{name}.o.weight"] = (width, inside)
            found[f"{prefix}.layer_norm.weight"] = (width,)

        for stack, layers in (("encoder", self.encoder_layers), ("decoder", self.decoder_layers)):
            for layer in range(layers):
                block = f"{stack}.block.{layer}.layer"
                attention(f"{block}.0", "SelfAttention")
                if stack == "decoder":
                    attention(f"{block}.1", "EncDecAttention")
                last = f"{block}.{1 if stack == 'encoder' else 2}"
                found[f"{last}.DenseReluDense.wi.weight"] = (inner := self.inner, width)
                found[f"{last}.DenseReluDense.wo.weight"] = (width, inner)
                found[f"{last}.layer_norm.weight"] = (width,)
            positions = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
            found[positions] = (self.buckets, self.heads)
            found[f"{stack}.final_layer_norm.weight"] = (width,)
        return {**found, "head.weight": (experts, width), "head.bias": (experts,)}


def shape_of(tensors: Mapping[str, npt.NDArray[Any]]) -> T5Shape:
    """Raises InvalidConfig."""
    numbers = tensors.get("shape")
    count = len(T5Shape._fields)
    if numbers is None or numbers.shape != (count,) or numbers.dtype.kind not in "iu":
        raise InvalidConfig("shape", None if numbers is None else numbers.shape, f"{count} whole numbers")
    shape = T5Shape(*(int(one) for one in numbers))
    shape.check()
    return shape


PAST_WEIGHTS: Final = 3
"""Of the network's logit, of the past's, and of the past's once more where the token is not known."""


def past_shapes(experts_per_layer: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that weigh the network against what a sequence has picked so far; a file has all or none.

    logit = p + b + w[0] (z − p) + (w[1] + w[2] if the token is unknown) (r − p), with the network's logit z, the past's
    r, the popularity's p, a weight w a layer and a bias b an expert.
    """
    size = sum(experts_per_layer)
    return {
        "past.popularity": (size,),
        "past.bias": (size,),
        "past.weights": (PAST_WEIGHTS, len(experts_per_layer)),
    }


def check_t5(tensors: Mapping[str, npt.NDArray[Any]], experts_per_layer: tuple[int, ...], vocabulary: int) -> None:
    """``shape``: a ``T5Shape``; ``tokens[V]``: the ids that are known, ascending; the weights, of half precision; and
    what ``past_shapes`` says, of single precision.

    The heads of all layers are one matrix, a row for each expert of the catalogue. Raises InvalidConfig, naming the
    tensor.
    """
    shape = shape_of(tensors)
    tokens = tensors.get("tokens")
    if tokens is None or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise InvalidConfig("tokens", None if tokens is None else tokens.shape, "one row of token ids")
    if len(tokens) and (np.diff(tokens.astype(np.int64)) <= 0).any():
        raise InvalidConfig("tokens", "ids that do not rise", "each id once, in ascending order")
    if len(tokens) and not 0 <= int(tokens[0]) <= int(tokens[-1]) < vocabulary:
        raise InvalidConfig("tokens", int(tokens[-1]), f"ids below the vocabulary of {vocabulary:,}")
    past = past_shapes(experts_per_layer) if "past.weights" in tensors else {}
    wanted = {**shape.weights(len(tokens), sum(experts_per_layer)), **past}
    found = tensors.keys() - {"shape", "tokens"}
    if found != wanted.keys():
        unlike = ", ".join(sorted(found ^ wanted.keys())[:5])
        raise InvalidConfig("tensors", unlike, "the weights of a T5 of its shape, no more and no less")
    for name, size in wanted.items():
        one, kind = tensors[name], np.dtype(np.float32 if name in past else np.float16)
        if one.shape != size or one.dtype != kind:
            raise InvalidConfig(name, f"{one.shape} of {one.dtype}", f"{size} of {kind}")
        if not np.isfinite(one).all():
            raise InvalidConfig(name, "numbers that are none", "finite numbers")
