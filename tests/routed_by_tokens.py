"""Traces whose picks follow their tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from greenroom.replay.traces.routing_trace import RoutingTrace

LAYERS, EXPERTS, TOKENS, LENGTH = 3, 6, 9, 24


def drawn(sequences: int, *, seed: int = 0) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Tokens of all sequences, and their prompts."""
    random = np.random.default_rng(seed)
    tokens = random.integers(TOKENS, size=(sequences, LENGTH))
    return tokens, [random.integers(TOKENS, size=1) for _ in range(sequences)]


def routed(tokens: NDArray[np.int64], prompts: list[NDArray[np.int64]]) -> RoutingTrace:
    """Layer 0 follows the token, layer 1 the token before it, layer 2 the prompt's."""
    before = np.concatenate([np.full((len(tokens), 1), 0), tokens[:, :-1]], axis=1)
    first = np.array([prompt[0] for prompt in prompts])[:, None].repeat(LENGTH, axis=1)
    picks = np.stack([tokens, before, first], axis=2) % EXPERTS
    starts = np.arange(len(tokens) + 1) * LENGTH
    ids = 100 + 3 * tokens.ravel()  # not side by side
    return RoutingTrace(
        picks.reshape(-1, LAYERS, 1).astype(np.uint8), starts, EXPERTS, token=ids, model="follows its tokens"
    )


def ids_of(prompts: list[NDArray[np.int64]]) -> list[NDArray[np.int64]]:
    return [100 + 3 * prompt for prompt in prompts]
