"""Attention over rows of many sequences at once. Each row sees only its own sequence.

A forward gets the rows of all its sequences as one batch row ``[1, T]``. Everything except attention treats rows one by
one. Attention is registered in transformers' registries of attention functions and of masks. It runs the family's own
function (sdpa, or its ``eager_attention_forward``) for each sequence. Few bf16 rows under sdpa take one compiled call
for all of them.

The family's own mask function (causal, sliding window, chunked) says what a row may see. It is evaluated for each
sequence, where transformers would expand it to a mask. Nothing is read from a configuration.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from greenroom.core.errors import UnsupportedModel
from greenroom.moe.attention.kv_cache import SequenceKV
from greenroom.moe.kernels.device_copies import to_device
from greenroom.moe.kernels.native.rows import NativeRows

RAGGED = "greenroom_ragged"
"""The name of this attention in transformers' registries."""

AttentionFunction = Callable[..., tuple[torch.Tensor, Any]]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of one sequence. ``tokens`` follow the rows that ``kv`` already holds.

    ``logit_rows``: for how many of the last rows logits are wanted, if it ``wants_logits``.
    """

    sequence: int
    tokens: Sequence[int]
    kv: SequenceKV
    prefill: bool
    wants_logits: bool
    logit_rows: int = 1


@dataclass(frozen=True, slots=True)
class _Sight:
    """What a chunk's rows see of their sequence: the keys from ``first`` on that ``mask`` does not hide.

    ``mask[1, 1, rows, keys]``: True where a row sees a key; None: each row sees all keys up to its own. ``causal``:
    each row sees all keys up to its own, from the first key on, even if there is a mask that says so.
    """

    first: int
    mask: torch.Tensor | None
    causal: bool = False


class RaggedMask:
    """Passed through a model in place of an attention mask: one ``_Sight`` a chunk."""

    __slots__ = ("_additive", "sights", "step")

    def __init__(self, step: RaggedStep, sights: Sequence[_Sight]) -> None:
        self.step = step
        self.sights = sights
        self._additive: list[torch.Tensor | None] | None = None

    def additive(self, dtype: torch.dtype) -> list[torch.Tensor | None]:
        """The masks that eager attention adds: 0, or the dtype's lowest number."""
        if self._additive is None:
            least = torch.finfo(dtype).min
            self._additive = [self._as_additive(i, dtype, least) for i in range(len(self.sights))]
        return self._additive

    def _as_additive(self, index: int, dtype: torch.dtype, least: float) -> torch.Tensor | None:
        mask, rows = self.sights[index].mask, len(self.step.chunks[index].tokens)
        if mask is None:
            if rows == 1:
                return None
            mask = _lower_triangle(rows, self.step.device)
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, least)


class KeysAndValues(Cache):  # type: ignore[misc]
    """A cache without layers, for subclasses that store the arguments of ``update`` elsewhere.

    To transformers the sequence begins here, and all offsets are 0. Raises UnsupportedModel if a family caches anything
    else, such as states of convolutions and recurrences, or keys of an indexer.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UnsupportedModel("its layers keep more of a sequence than keys and values")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = update_indexer = _refuse


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` takes its cache: ``past_key_values`` before transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


class RaggedStep(KeysAndValues):
    """One forward's chunks, passed through the model as its cache.

    Only this module knows the position of each chunk in its sequence.
    """

    def __init__(
        self, chunks: Sequence[Chunk], device: torch.device, attention: str, native: NativeRows | None = None
    ) -> None:
        super().__init__()
        self.chunks = chunks
        self.device = device
        self.attention = attention
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._row_wise = RowWise(chunks, native) if native is not None and attention == "sdpa" else None

    def causal_mask(self) -> RaggedMask:
        """The mask of plain causal attention: each row sees its sequence up to itself."""
        return RaggedMask(self, [_sight(causal_mask_function, chunk, self.device) for chunk in self.chunks])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep the step's rows, to be written when the layer attends. Returns its arguments."""
        self._written[layer_idx] = key_states, value_states
        return key_states, value_states

    def attend_causally(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: RaggedMask,
        scale: float,
    ) -> torch.Tensor:
        """``[T, heads * value_dim]`` from ``[T, heads, dim]`` each. ``mask``: of ``causal_mask``. The heads must have a
        width that the compiled attention supports.
        """
        if self._row_wise is not None and self._row_wise.takes_all:
            output = self._row_wise.attend(module.layer_idx, None, query, key, value, scale)  # type: ignore[arg-type]
        else:
            # With heads before rows, as the modules have it.
            query, key, value = (part[None].transpose(1, 2) for part in (query, key, value))
            self.update(key, value, module.layer_idx)  # type: ignore[arg-type]
            output = self.attend(module, query, key, mask, {"dropout": 0.0, "scaling": scale})
        return output.reshape(output.shape[-3], -1)

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: RaggedMask,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """``[1, T, heads, value_dim]``: each chunk's rows attend to their own sequence."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        expand = None
        keys, values = self._written.pop(layer, (None, None))
        if keys is None or values is None:
            raise UnsupportedModel(f"{type(module).__name__} attends to keys and values of another layer")
        if key is not keys:
            # Latent attention caches the latents, and expands them to keys and values later.
            expand = getattr(module, "expand_kv", None)
            if expand is None:
                raise UnsupportedModel(f"{type(module).__name__} changes keys and values between cache and attention")
        eager = self.attention == "eager" or options.get("softcap") is not None
        output = None
        done: Collection[int] = ()
        if self._row_wise is not None and not eager and expand is None:
            done = self._row_wise.ready(mask.sights, query, keys, values, options)
            if done:
                q, k, v = (part[0].transpose(0, 1) for part in (query, keys, values))
                firsts = {number: mask.sights[number].first for number in done}
                output = self._row_wise.attend(layer, firsts, q, k, v, options.get("scaling"))[None]
                if len(done) == len(self.chunks):
                    return output
        function = own_attention(module) if eager else sdpa_attention_forward
        masks = mask.additive(query.dtype) if eager else [sight.mask for sight in mask.sights]
        outputs = []
        start = 0
        for number, (chunk, sight, visible) in enumerate(zip(self.chunks, mask.sights, masks, strict=True)):
            stop = start + len(chunk.tokens)
            if number not in done:
                chunk.kv.write(layer, keys[:, :, start:stop], values[:, :, start:stop])
                own_keys, own_values = chunk.kv.read(layer, sight.first, chunk.kv.length + len(chunk.tokens))
                if expand is not None:
                    own_keys, own_values = expand(own_keys, own_values)
                queries = query[:, :, start:stop]
                slices = []
                for some in _slices(queries, own_keys, own_values, visible, eager=eager):
                    seen = None if visible is None else visible[:, :, some]
                    slices.append(function(module, queries[:, :, some], own_keys, own_values, seen, **options)[0])
                rows = slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)
                if output is None:
                    outputs.append(rows)
                else:
                    output[:, start:stop] = rows
            start = stop
        if output is not None:
            return output
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


SCORES_AT_ONCE = 256 * 2**20
"""Bytes of scores (one a head, row and key) above which a chunk's rows attend in several slices. Short contexts stay
below it. Eager attention, and sdpa with keys and values of different widths, hold all their scores several times.
"""

LEAST_ROWS_AT_ONCE = 16
"""Each slice costs a copy of the keys and values for all heads. In multiples of this, rows are equal to the bit."""


def holds_scores(eager: bool, key_dim: int, value_dim: int) -> bool:
    """Whether attention with keys and values of these widths holds the scores of all its rows at once."""
    return eager or key_dim != value_dim


def packs_keys(device: torch.device, itemsize: int) -> bool:
    """Whether sdpa's fast kernel copies all heads' keys and values once more, in the order that AMX multiplies them.

    On the CPU alone, and only numbers of two bytes. Where this torch does not tell of AMX, it is taken to be there.
    """
    announced = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return device.type == "cpu" and itemsize == 2 and (announced is None or bool(announced()))


def rows_at_once(rows: int, keys: int, heads: int, itemsize: int) -> int:
    """How many of a chunk's rows attend to so many keys at once, if scores are held."""
    most = SCORES_AT_ONCE // (keys * heads * itemsize)
    return min(rows, max(LEAST_ROWS_AT_ONCE, most - most % LEAST_ROWS_AT_ONCE))


def _slices(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, *, eager: bool
) -> list[slice]:
    """The rows of a chunk, in slices if that saves memory. Rows attend independently."""
    heads, rows = queries.shape[1:3]
    most = rows
    if mask is not None and holds_scores(eager, keys.shape[3], values.shape[3]):
        most = rows_at_once(rows, keys.shape[2], heads, queries.element_size())
    return [slice(begin, begin + most) for begin in range(0, rows, most)]


_PAIRS_WORTH_A_PRODUCT = 1024
"""Pairs of a row and a key that it sees, above which a chunk's attention is no slower as a product of matrices. From
there the product makes up for its time in Python (``benchmarks/micro/short_prompts.py``).
"""


class RowWise:
    """The chunks of one or few rows in a step: decoding sequences and short prompts. One compiled call a layer computes
    all their rows.

    A row's result does not depend on other rows, so it is the same in any step.
    """

    def __init__(self, chunks: Sequence[Chunk], native: NativeRows) -> None:
        self._native = native
        self._spans: dict[int, range] = {}  # by chunk: its rows in the table
        table: list[tuple[int, ...]] = []  # see NativeRows.attention
        addresses: list[NDArray[np.int64]] = []
        start = 0
        for number, chunk in enumerate(chunks):
            count, before, capacity, stride = len(chunk.tokens), chunk.kv.length, chunk.kv.capacity, chunk.kv.stride
            if count == 1 or count * before + count * (count + 1) // 2 <= _PAIRS_WORTH_A_PRODUCT:
                if before + count > capacity:
                    raise ValueError(f"{before + count} rows do not fit into a reservation of {capacity}")
                self._spans[number] = range(len(table), len(table) + count)
                table += [(start + i, 0, 0, stride, before + i, 0) for i in range(count)]
                addresses += [chunk.kv.addresses] * count
            start += count
        self._table = np.array(table, dtype=np.int64).reshape(-1, 6)
        self._addresses = np.stack(addresses, axis=1) if addresses else np.empty((0, 0, 2), dtype=np.int64)
        self.takes_all = len(self._spans) == len(chunks)
        """Whether the step has no other chunks."""

    def ready(
        self,
        sights: Sequence[_Sight],
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: Mapping[str, Any],
    ) -> Collection[int]:
        """The numbers of the chunks whose attention in this layer the compiled call can compute."""
        wide = self._native.attention_granularity
        if (
            query.dtype is not torch.bfloat16
            or query.device.type != "cpu"
            or keys.shape[3] % wide
            or values.shape[3] % wide
            or any(tensor.stride(3) != 1 for tensor in (query, keys, values))
            or any(isinstance(value, torch.Tensor) for name, value in options.items() if name != "position_ids")
        ):
            return ()
        return {
            number: None
            for number, rows in self._spans.items()
            if sights[number].causal or (len(rows) == 1 and sights[number].mask is None)
        }

    def attend(
        self,
        layer: int,
        firsts: Mapping[int, int] | None,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """``[T, heads, value_dim]`` from ``[T, heads, dim]`` each.

        ``firsts``: the first key that is seen, for each chunk whose rows are to be written; None: all chunks, from
        their first key on.
        """
        table, addresses = self._table, self._addresses[layer]
        if firsts is not None:
            chosen = [row for number in firsts for row in self._spans[number]]
            table, addresses = table[chosen], addresses[chosen]
            table[:, 5] = [first for number, first in firsts.items() for _ in self._spans[number]]
        table[:, 1:3] = addresses
        output = torch.empty(*query.shape[:2], values.shape[2], dtype=query.dtype)
        self._native.attention(query, keys, values, table, output, query.shape[2] ** -0.5 if scale is None else scale)
        return output


_active = threading.local()


@contextmanager
def running(step: RaggedStep) -> Iterator[None]:
    """Within it this thread builds masks for ``step``.

    A forward runs on one thread, so models in one process do not disturb each other. Attention itself finds its step in
    the mask.
    """
    if getattr(_active, "step", None) is not None:
        raise RuntimeError("a forward within a forward")
    _active.step = step
    try:
        yield
    finally:
        _active.step = None


def _ragged_mask(mask_function: Callable[..., torch.Tensor], **kwargs: Any) -> RaggedMask:
    step: RaggedStep | None = getattr(_active, "step", None)
    if step is None:
        raise RuntimeError(f"attention {RAGGED!r} is for the batch loop's forwards only")
    if kwargs.get("use_vmap"):
        raise UnsupportedModel("its attention mask is not a function of positions alone")
    return RaggedMask(step, [_sight(mask_function, chunk, step.device) for chunk in step.chunks])


def _sight(mask_function: Callable[..., torch.Tensor], chunk: Chunk, device: torch.device) -> _Sight:
    before, rows = chunk.kv.length, len(chunk.tokens)
    causal = mask_function is causal_mask_function
    if causal and (rows == 1 or before == 0):
        return _Sight(0, None, causal)
    # On the CPU in any case, because the result decides which slice is read.
    nothing = torch.zeros((), dtype=torch.int64)
    queries = torch.arange(before, before + rows)[:, None]
    keys = torch.arange(before + rows)[None, :]
    mask = mask_function(nothing, nothing, queries, keys).expand(rows, before + rows)
    first = int(mask.any(dim=0).to(torch.uint8).argmax())
    mask = mask[:, first:]
    if before == 0 and first == 0:
        plain = torch.equal(mask, _lower_triangle(rows, mask.device)[0, 0])
    else:
        plain = rows == 1 and bool(mask.all())
    if plain:
        return _Sight(first, None)
    return _Sight(first, to_device(mask[None, None], device), causal)


def _lower_triangle(rows: int, device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, rows, rows, dtype=torch.bool, device=device).tril_()


def _ragged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask | torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if not isinstance(attention_mask, RaggedMask):
        raise UnsupportedModel(f"{type(module).__name__} builds an attention mask of its own")
    if options.get("position_bias") is not None:
        raise UnsupportedModel(f"{type(module).__name__} adds a position bias")
    return attention_mask.step.attend(module, query, key, attention_mask, options), None


def own_attention(module: torch.nn.Module) -> AttentionFunction:
    """The eager attention function of the family that ``module`` belongs to.

    Raises UnsupportedModel if the family has none.
    """
    for owner in type(module).__mro__:
        function = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if function is not None:
            return function  # type: ignore[no-any-return]
    raise UnsupportedModel(f"{type(module).__name__} has no attention function of its own to delegate to")


AttentionInterface.register(RAGGED, _ragged_attention)
AttentionMaskInterface.register(RAGGED, _ragged_mask)
