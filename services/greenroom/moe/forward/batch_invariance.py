"""Whether a row's result is the same whatever rows are beside it, and however its prompt is cut into chunks.

The compiled products and the compiled attention sum each row in one order. torch's change it with the number of rows,
and then bf16 texts change with the company in which they are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from greenroom.core.errors import InvalidConfig
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.forward.ragged_probe import experts_bypassed
from greenroom.moe.loading.load_model import LoadedMoE
from greenroom.moe.native.rows import ANY_ROWS

_ROWS = 37
_BESIDE = 29


def why_not(loaded: LoadedMoE, ragged: RaggedModel) -> str | None:
    """Why a row's result may change with the rows beside it. None: it does not."""
    native = ragged.native
    if native is None:
        return "torch computes its products"
    if min(native.limits) < ANY_ROWS:
        return "torch computes products of many rows, which is faster here: --batch-invariant does without"
    if not ragged.attention_compiled:
        return "torch computes its attention"
    if not loaded.routers_found:
        return "torch computes its routers"
    return None


def require(loaded: LoadedMoE, ragged: RaggedModel) -> None:
    """Have the compiled products compute any number of rows from now on.

    Raises InvalidConfig where a row's result would still change with others. What holds by construction is tried too,
    without experts, so not what routers pick: a family may mix rows in a way that is not known.
    """
    if ragged.native is not None:
        ragged.native.remove_limits()
    reason = why_not(loaded, ragged)
    if reason is None and not _same_in_any_company(ragged):
        reason = f"{loaded.model.config.model_type} computes something of a row that depends on others"
    if reason is not None:
        raise InvalidConfig("batch_invariant", True, f"{reason}; leave it out, or choose a model in bf16 on a CPU")


@dataclass(frozen=True, slots=True)
class _Way:
    """How a prompt comes: in chunks of ``rows``, beside another sequence's rows or alone."""

    rows: int
    beside: bool


def _same_in_any_company(ragged: RaggedModel) -> bool:
    source, ragged.source = ragged.source, None
    try:
        with experts_bypassed(ragged.model):
            whole = _logits(ragged, _Way(_ROWS, beside=False))
            ways: Sequence[_Way] = (_Way(1, beside=False), _Way(1, beside=True), _Way(16, beside=True))
            return all(torch.equal(_logits(ragged, way), whole) for way in ways)
    finally:
        ragged.source = source


def _logits(ragged: RaggedModel, way: _Way) -> torch.Tensor:
    rows = min(_ROWS, ragged.max_positions)
    tokens = [(11 * i + 5) % ragged.vocab_size for i in range(rows)]
    store = KVStore(ragged.layout, 2 * ragged.layout.nbytes(rows))
    kv, found = store.reserve(rows), []
    while kv.length < rows:
        count = min(way.rows, rows - kv.length)
        chunks = [Chunk(0, tokens[kv.length : kv.length + count], kv, count > 1, True, count)]
        if way.beside:
            chunks.insert(0, Chunk(1, tokens[: min(_BESIDE, rows)][::-1], store.reserve(rows), True, False))
        found.append(ragged.forward(chunks))
        kv.commit(count)
        if way.beside:
            store.release(chunks[0].kv)
    return torch.cat(found)
