"""Log-probabilities of many tokens, packed as the journal and the RPCs carry them."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Token, TokenLogprobs
from greenroom.core.messages.journal import TokenLogprobArrays

_FLOAT = 4


def pack_logprobs(tokens: Sequence[Token]) -> TokenLogprobArrays | None:
    """The log-probabilities of ``tokens``; None where they have none. Where a token has fewer of the most likely ones
    than another (a small vocabulary), it is filled up with id -1."""
    given = [token.logprobs for token in tokens if token.logprobs is not None]
    return pack(given) if len(given) == len(tokens) else None


def pack(given: Sequence[TokenLogprobs]) -> TokenLogprobArrays | None:
    """None where there are none."""
    if not given:
        return None
    k = max(len(logprobs.top) for logprobs in given)
    ids: list[int] = []
    values: list[float] = []
    for logprobs in given:
        missing = k - len(logprobs.top)
        ids += [token_id for token_id, _ in logprobs.top] + [-1] * missing
        values += [value for _, value in logprobs.top] + [0.0] * missing
    n = len(given)
    return TokenLogprobArrays(
        chosen=struct.pack(f"<{n}f", *(logprobs.chosen for logprobs in given)),
        top_ids=struct.pack(f"<{n * k}i", *ids),
        top=struct.pack(f"<{n * k}f", *values),
        k=k,
    )


def unpack_tokens(ids: Sequence[int], logprobs: TokenLogprobArrays | None, start: int = 0) -> list[Token]:
    """Tokens from ``start`` on. Raises InvalidRequest where the arrays do not fit ``ids``."""
    if logprobs is None:
        return [Token(start + i, token_id) for i, token_id in enumerate(ids)]
    own = unpack(logprobs, len(ids))
    return [Token(start + i, token_id, own[i]) for i, token_id in enumerate(ids)]


def unpack(logprobs: TokenLogprobArrays, n: int) -> list[TokenLogprobs]:
    """Of ``n`` tokens. Raises InvalidRequest where the arrays are not of so many."""
    k = logprobs.k
    if (len(logprobs.chosen), len(logprobs.top_ids), len(logprobs.top)) != (n * _FLOAT, n * k * _FLOAT, n * k * _FLOAT):
        raise InvalidRequest(f"log-probabilities do not fit {n} tokens with {k} each", param="logprobs")
    chosen = struct.unpack(f"<{n}f", logprobs.chosen)
    top_ids = struct.unpack(f"<{n * k}i", logprobs.top_ids)
    top = struct.unpack(f"<{n * k}f", logprobs.top)
    found = []
    for i in range(n):
        best = tuple(
            (other, value)
            for other, value in zip(top_ids[i * k : (i + 1) * k], top[i * k : (i + 1) * k], strict=True)
            if other >= 0
        )
        found.append(TokenLogprobs(chosen[i], best))
    return found
