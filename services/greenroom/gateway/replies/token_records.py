"""What a reply says of one token."""

from __future__ import annotations

from dataclasses import dataclass

from greenroom.core.generation import TokenLogprobs


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A token with its log-probabilities; ``offset`` is its place in the text, in characters. Before the first token of
    a prompt there is nothing, so that one has None."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None
