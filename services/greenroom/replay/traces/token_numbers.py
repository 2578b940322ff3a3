"""Which tokens a trace's rows are of: by whose numbers, and what can not be learnt from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from greenroom.policies.base.array_types import Counts
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.trace_file import TraceError


def tokens_of(trace: RoutingTrace, vocabulary: int | None = None) -> Counts:
    """``[tokens]``: the id of each row's input. Raises TraceError for a trace without tokens, and for ids beyond
    ``vocabulary``, the number of ids that the model knows."""
    if trace.token is None:
        raise TraceError("this trace has no array token, and no decode_tokens in a .meta.jsonl beside it")
    if vocabulary is not None and (beyond := trace.token >= vocabulary).any():
        raise TraceError(f"token of row {int(beyond.argmax())} must lie below {vocabulary:,}, the model's vocabulary")
    return trace.token


def vocabulary_of(trace: RoutingTrace) -> int:
    """How many ids there are, as far as the trace tells: of numbered texts, one more than those, which is the unknown
    token. Raises TraceError for a trace without tokens."""
    tokens = tokens_of(trace)
    if trace.token_texts is not None:
        return len(trace.token_texts) + 1
    return int(tokens.max(initial=0)) + 1


def texts_digest(trace: RoutingTrace) -> str:
    """Names the numbering of texts, since what was learnt by one says nothing of tokens under another. "": the tokens
    are ids of the model."""
    if trace.token_texts is None:
        return ""
    return blake2b("\0".join(trace.token_texts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def texts_of(trace: RoutingTrace, sequences: int | Iterable[int]) -> tuple[str, ...]:
    """The texts of tokens in the order in which they first appear in ``sequences``: the first so many, or these in
    their order. Raises TraceError for a trace whose tokens are ids already."""
    tokens, texts = tokens_of(trace), trace.token_texts
    if texts is None:
        raise TraceError("token: these are the model's own ids, and no texts")
    chosen = range(sequences) if isinstance(sequences, int) else sequences
    rows = [tokens[trace.seq_starts[one] : trace.seq_starts[one + 1]] for one in chosen]
    found, first = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *rows]), return_index=True)
    return tuple(texts[one] for one in found[np.argsort(first)].tolist() if one < len(texts))


def numbered(trace: RoutingTrace, texts: Sequence[str]) -> RoutingTrace:
    """The same with text i of ``texts`` as the id i; all other texts are one id, ``len(texts)``: the unknown token.
    Raises TraceError as ``texts_of`` does."""
    tokens, own = tokens_of(trace), trace.token_texts
    if own is None:
        raise TraceError("token: these are the model's own ids, and no texts")
    numbers = {text: number for number, text in enumerate(texts)}
    places = np.array([numbers.get(text, len(numbers)) for text in own] + [len(numbers)], dtype=np.int64)
    return replace(trace, token=places[tokens], token_texts=tuple(texts))


def numbered_by(trace: RoutingTrace, sequences: int | Iterable[int]) -> RoutingTrace:
    """The same with tokens numbered by first appearance in ``sequences``, those that are learnt from; what is not in
    them is the unknown token. A trace whose tokens are the model's own ids stays as it is. Raises TraceError."""
    if trace.token is not None and trace.token_texts is None:
        return trace
    return numbered(trace, texts_of(trace, sequences))
