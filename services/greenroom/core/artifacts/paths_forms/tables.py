"""The form ``tables``: what a row's token, the tokens before it and its sequence add to the logits of all experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from greenroom.core.errors import InvalidConfig

TABLES: Final = "tables"

GRAMS: Final[Mapping[str, tuple[int, ...]]] = {
    "token": (0,),
    "pair": (1, 0),
    "triple": (2, 1, 0),
    "before": (1,),
    "pair_before": (2, 1),
    "two_before": (2,),
}
"""The tables, and how far back in the sequence lie the tokens by which a row of each is found, the farthest first."""

BACKS_OFF_TO: Final[Mapping[str, str]] = {"pair": "token", "triple": "pair", "pair_before": "before"}
"""A table says by how much it differs from this one. The others differ from how often each expert is picked."""

LAST: Final = 3
"""So many earlier rows of the same token in the same sequence enter with their own picks."""

OWN_PICKS: Final = (*(f"same_token_{number}" for number in range(1, LAST + 1)), "same_pair")
"""Earlier rows of the same sequence: of the same token, the last one first, and the last of the same pair of tokens."""

ALONE, PAST, PICKS = range(3)
"""What is known of a row's sequence: nothing but its tokens; the chances by its past; and the picks of its rows too."""
MODES: Final = ("tokens", "past", "picks")

LARGEST_KNOWN: Final = 2**20
"""Of how many distinct tokens there may be tables."""
MOST_RATES: Final = 8
"""Each costs a sequence an array of all experts, and a row as many sums."""


def feature_names(rates: int) -> tuple[str, ...]:
    """Of the rows of ``weights``, for ``rates`` averages over earlier tokens.

    After the tables come these averages; the past, and the past again where the token has no row; for each of
    ``OWN_PICKS`` what it adds to the experts that were picked; and what it adds to all of the layer, where it is there.
    """
    context = (f"context_{number}" for number in range(rates))
    return (*GRAMS, *context, "past", "past_of_unknown", *OWN_PICKS, *(f"has_{name}" for name in OWN_PICKS))


def check_tables(tensors: Mapping[str, npt.NDArray[Any]], experts_per_layer: tuple[int, ...], vocabulary: int) -> None:
    """Raises InvalidConfig, naming the tensor.

    ``popularity[N]``: the logit of how often each expert is picked. ``bias[3, N]`` and ``weights[3, F, layers]``: for
    each of ``MODES``, and each of ``feature_names``. ``keep[C]``: what the averages over earlier tokens, one to
    ``MOST_RATES``, keep at a token. ``tokens[K]``: the ids that there are tables of, ascending. Of each of ``GRAMS``:
    ``NAME.keys[R, n]``, places in ``tokens``, in ascending order; ``NAME.logits[R, N]``, in bytes, whole numbers of
    ``NAME.unit[1]``.
    """
    size, layers = sum(experts_per_layer), len(experts_per_layer)
    names = ["popularity", "bias", "weights", "keep", "tokens"]
    names += [f"{gram}.{part}" for gram in GRAMS for part in ("keys", "logits", "unit")]
    if missing := [name for name in names if name not in tensors]:
        raise InvalidConfig("tensors", sorted(tensors), f"with {', '.join(missing)}")
    keep, tokens = tensors["keep"], tensors["tokens"]
    if keep.ndim != 1 or not 1 <= len(keep) <= MOST_RATES:
        raise InvalidConfig("keep", keep.shape, f"from 1 to {MOST_RATES} rates")
    if not ((keep > 0) & (keep < 1)).all():
        raise InvalidConfig("keep", keep.tolist(), "rates between 0 and 1")
    _check_array("popularity", tensors, (size,), np.float32)
    _check_array("bias", tensors, (len(MODES), size), np.float32)
    _check_array("weights", tensors, (len(MODES), len(feature_names(len(keep))), layers), np.float32)
    _check_array("tokens", tensors, (tokens.size,), np.uint32)
    if tokens.size > LARGEST_KNOWN or (np.diff(tokens.astype(np.int64)) <= 0).any() or (tokens >= vocabulary).any():
        raise InvalidConfig("tokens", f"{tokens.size:,} ids", f"ascending ids below {vocabulary:,}, the vocabulary")
    for gram, offsets in GRAMS.items():
        keys = tensors[f"{gram}.keys"]
        _check_array(f"{gram}.keys", tensors, (len(keys), len(offsets)), np.uint32)
        _check_array(f"{gram}.logits", tensors, (len(keys), size), np.int8)
        _check_array(f"{gram}.unit", tensors, (1,), np.float32)
        if (keys >= tokens.size).any() or (np.diff(codes_of(keys, tokens.size)) <= 0).any():
            raise InvalidConfig(f"{gram}.keys", keys.shape, f"places of tokens, below {tokens.size:,}, ascending")


def codes_of(keys: npt.NDArray[np.integer], tokens: int) -> npt.NDArray[np.int64]:
    """One number for each row of ``keys[R, n]``, places below ``tokens``: in the same order as the rows."""
    found = np.zeros(len(keys), dtype=np.int64)
    for column in range(keys.shape[1]):
        found *= tokens
        found += keys[:, column].astype(np.int64)
    return found


def _check_array(name: str, tensors: Mapping[str, npt.NDArray[Any]], shape: tuple[int, ...], dtype: type) -> None:
    array = tensors[name]
    if array.shape != shape or array.dtype != dtype:
        raise InvalidConfig(name, f"{array.shape} of {array.dtype}", f"{shape} of {np.dtype(dtype)}")
    if not np.isfinite(array).all():
        raise InvalidConfig(name, "numbers that are none", "finite numbers")
