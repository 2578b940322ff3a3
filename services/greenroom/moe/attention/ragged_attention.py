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
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from greenroom.core.errors import UnsupportedModel
from greenroom.moe.attention.compiled_attention import CompiledAttention
from greenroom.moe.attention.kv_cache import SequenceKV
from greenroom.moe.attention.sight import MaskFunction, Sight, lower_triangle
from greenroom.moe.native.rows import NativeRows

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


class RaggedMask:
    """Passed through a model in place of an attention mask: one ``Sight`` a chunk."""

    def __init__(self, step: RaggedStep, mask_function: MaskFunction) -> None:
        self.step = step
        self.sights = [Sight(mask_function, chunk.kv.length, len(chunk.tokens), step.device) for chunk in step.chunks]
        self._additive: dict[int, torch.Tensor | None] = {}

    @cached_property
    def firsts(self) -> NDArray[np.int64]:
        """``[T]``: the first key that each row sees, if all rows of its chunk see all keys up to their own; else -1."""
        return np.concatenate(
            [
                np.full(len(chunk.tokens), -1) if sight.firsts is None else sight.firsts
                for chunk, sight in zip(self.step.chunks, self.sights, strict=True)
            ]
        )

    @cached_property
    def others(self) -> Collection[int]:
        """The numbers of the chunks of which a row sees other keys."""
        return {number for number, sight in enumerate(self.sights) if sight.firsts is None}

    def additive(self, number: int, dtype: torch.dtype) -> torch.Tensor | None:
        """A chunk's mask as eager attention adds it: 0, or the dtype's lowest number. Of one dtype."""
        if number not in self._additive:
            mask, rows = self.sights[number].mask, len(self.step.chunks[number].tokens)
            if mask is None and rows > 1:
                mask = lower_triangle(rows, self.step.device)[None, None]
            self._additive[number] = (
                None
                if mask is None
                else torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
                    ~mask, torch.finfo(dtype).min
                )
            )
        return self._additive[number]


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
        self.torch_attended = False
        """Whether torch has computed the attention of any chunk."""
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._compiled = None if native is None else CompiledAttention(chunks, native, sinks=attention == "eager")

    def causal_mask(self) -> RaggedMask:
        """The mask of plain causal attention: each row sees its sequence up to itself."""
        return RaggedMask(self, causal_mask_function)

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
        if self._compiled is not None:
            options = {"scaling": scale}
            output = self._compiled.attend(module.layer_idx, mask.firsts, query, key, value, options)  # type: ignore[arg-type]
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
        output = None
        left: Collection[int] = range(len(self.chunks))
        if expand is None and self._compiled is not None and self._compiled.supports(query, keys, values, options):
            q, k, v = (part[0].transpose(0, 1) for part in (query, keys, values))
            output = self._compiled.attend(layer, mask.firsts, q, k, v, options)[None]
            left = mask.others
            if not left:
                return output
        outputs = []
        start = 0
        for number, chunk in enumerate(self.chunks):
            stop = start + len(chunk.tokens)
            if number in left:
                sight = mask.sights[number]
                chunk.kv.write(layer, keys[:, :, start:stop], values[:, :, start:stop])
                own_keys, own_values = chunk.kv.read(layer, sight.first, chunk.kv.length + len(chunk.tokens))
                if expand is not None:
                    own_keys, own_values = expand(own_keys, own_values)
                rows = self._attended(module, number, mask, query[:, :, start:stop], own_keys, own_values, options)
                if output is None:
                    outputs.append(rows)
                else:
                    output[:, start:stop] = rows
            start = stop
        if output is not None:
            return output
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)

    def _attended(
        self,
        module: torch.nn.Module,
        number: int,
        mask: RaggedMask,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """``[1, rows, heads, value_dim]``: the rows of one chunk attend to these keys of their sequence."""
        sight = mask.sights[number]
        if (
            self._compiled is not None
            and sight.firsts is not None
            and self._compiled.supports(query, keys, values, options)
        ):
            q, k, v = (part[0].transpose(0, 1) for part in (query, keys, values))
            return self._compiled.attend_to(sight.firsts - sight.first, q, k, v, options)[None]
        self.torch_attended = True
        eager = self.attention == "eager" or options.get("softcap") is not None
        function = own_attention(module) if eager else sdpa_attention_forward
        visible = mask.additive(number, query.dtype) if eager else sight.mask
        slices = []
        for some in _slices(query, keys, values, visible, eager=eager):
            seen = None if visible is None else visible[:, :, some]
            slices.append(function(module, query[:, :, some], keys, values, seen, **options)[0])
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)


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
    return RaggedMask(step, mask_function)


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
