"""Whether a model can run ragged, and what it keeps of a token: tried before the first request."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from greenroom.core.errors import GreenroomError, UnsupportedModel
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.attention.ragged_attention import Chunk, KeysAndValues, cache_argument
from greenroom.moe.forward.lean_decoder import LeanDecoder, lean_decoder
from greenroom.moe.forward.ragged_forward import RaggedForward
from greenroom.moe.native.rows import NativeRows

log = logging.getLogger(__name__)

_BYPASS = "greenroom_bypass"
_TOKENS = 6
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 2e-2}
_TOLERANCE_ELSE = 1e-3
"""The largest difference that counts as rounding: root mean square over a row's logits, as a share of their standard
deviation. Measured in bf16: at most 0.008 over 32 layers, and at least 0.16 where one layer mixes rows.
"""

_STATEFUL_LAYERS = ("linear", "mamba", "conv", "recurrent", "hybrid", "compressed")


def refuse_unsupported(model: Any) -> None:
    """Raises UnsupportedModel for a model that is known not to fit, without running it."""
    family = model.config.model_type
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{family} is an encoder-decoder: its decoder attends to encoder states, which the batch loop does not hold"
        )
    refuse_stateful(model.config, type(model))
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{family} does not let its attention function be replaced")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise UnsupportedModel(f"{family} computes the logits of every row, which no long prompt has the memory for")


def refuse_stateful(config: Any, generating: type[Any]) -> None:
    """The same of layers with a running state, before anything is packed. ``generating``: the model's class."""
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    stateful = sorted({kind for kind in layer_types if any(word in kind for word in _STATEFUL_LAYERS)})
    if stateful or getattr(generating, "_is_stateful", False):
        raise UnsupportedModel(
            f"{config.model_type} has layers with a running state ({', '.join(stateful) or 'linear attention'}); the"
            " batch loop holds keys and values only, of which it can take rows back"
        )


def position_limit(config: Any) -> int:
    """The most tokens a sequence may have.

    Some rotary frequencies change with the longest sequence of a batch ("dynamic", "longrope"). Rows would then depend
    on their neighbours, so the limit of such models is where their frequencies begin to change.
    """
    config = config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if limit is None:
        raise UnsupportedModel(f"the configuration of {config.model_type} does not say how long a sequence may be")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            original = parameters.get("original_max_position_embeddings")
            limit = min(limit, int(original or config.original_max_position_embeddings))
    return int(limit)


def probe(ragged: RaggedForward) -> KVLayout:
    """What the model keeps of a token. Leaves its attention ragged.

    Runs the model on a few tokens as it is, and then ragged, as two sequences in uneven chunks. Raises UnsupportedModel
    if the second run fails, or differs by more than rounding; the attention is then what it was.
    """
    model, family = ragged.model, ragged.model.config.model_type
    tokens = [(7 * i + 3) % ragged.vocab_size for i in range(_TOKENS)]
    recorder = _Recorder()
    try:
        with torch.inference_mode(), experts_bypassed(model):
            model.set_attn_implementation(ragged.attention)
            ids = torch.tensor([tokens], device=ragged.device)
            reference = model(input_ids=ids, use_cache=True, **{cache_argument(model): recorder}).logits[0]
            layout = recorder.layout(ragged.device)
            ragged.engage()
            off = _worst_difference(ragged, layout, tokens, reference)
    except Exception as error:
        ragged.restore()
        reason = str(error) if isinstance(error, GreenroomError) else f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"{family} can not run in the batch loop: {reason}") from error
    if not off <= _TOLERANCE.get(layout.dtype, _TOLERANCE_ELSE):
        ragged.restore()
        raise UnsupportedModel(
            f"{family} computes something else in the batch loop than alone (off by {off:.2g} of the logits' spread):"
            " its layers mix rows in a way that greenroom does not know"
        )
    return layout


def proven_lean_decoder(ragged: RaggedForward, layout: KVLayout, native: NativeRows) -> LeanDecoder | None:
    """The model's lean decoder. None: it has none whose steps equal those of its modules to the bit."""
    lean, family = lean_decoder(ragged.model, native), ragged.model.config.model_type
    if lean is None:
        return None
    tokens = [(11 * i + 5) % ragged.vocab_size for i in range(_TOKENS)]
    try:
        with experts_bypassed(ragged.model), native.without_limits():
            expected, found = (_trial(ragged, layout, tokens, decoder) for decoder in (None, lean))
    except Exception as error:  # its layers are of another build: their modules compute them
        log.info("%s has no lean decoder: %s: %s", family, type(error).__name__, error)
        return None
    finally:
        ragged.lean = None
    if not torch.equal(expected, found):
        log.info("%s has no lean decoder: its modules compute something else", family)
        return None
    return lean


def _trial(ragged: RaggedForward, layout: KVLayout, tokens: list[int], decoder: LeanDecoder | None) -> torch.Tensor:
    """Logits of two sequences: prompts whole and in chunks, with single rows beside them and without."""
    ragged.lean = decoder
    store = KVStore(layout, 2 * layout.nbytes(_TOKENS))
    kvs = [store.reserve(_TOKENS) for _ in range(2)]
    logits = []
    for rows in ((1, 3), (1, 2), (2, 1), (1, 0), (1, 0)):
        chunks = [
            Chunk(n, tokens[kv.length : kv.length + count], kv, prefill=count > 1, wants_logits=True)
            for n, (kv, count) in enumerate(zip(kvs, rows, strict=True))
            if count
        ]
        logits.append(ragged.forward(chunks))
        for chunk in chunks:
            chunk.kv.commit(len(chunk.tokens))
    return torch.cat(logits)


def kv_layout_of(model: Any) -> KVLayout:
    """What a model without weights (on the meta device) would keep of a token.

    Raises UnsupportedModel, with the reason, for a model that the batch loop is known not to serve.
    """
    refuse_unsupported(model)
    recorder = _Recorder()
    device = torch.device("meta")
    with torch.inference_mode(), experts_bypassed(model):
        ids = torch.zeros((1, _TOKENS), dtype=torch.int64, device=device)
        model(input_ids=ids, **{cache_argument(model): recorder})
    return recorder.layout(device)


def _worst_difference(ragged: RaggedForward, layout: KVLayout, tokens: list[int], reference: torch.Tensor) -> float:
    """The worst row's difference from ``reference[tokens, vocabulary]``: root mean square over standard deviation."""
    store = KVStore(layout, 2 * layout.nbytes(len(tokens)))
    kvs = [store.reserve(len(tokens)) for _ in range(2)]
    worst = 0.0
    for stops in ((3, 1), (4, 5), (6, 6)):
        chunks = [
            Chunk(sequence, tokens[kv.length : stop], kv, prefill=True, wants_logits=True)
            for sequence, (kv, stop) in enumerate(zip(kvs, stops, strict=True))
        ]
        logits = ragged.forward(chunks)
        for ours, chunk, stop in zip(logits, chunks, stops, strict=True):
            row = reference[stop - 1].float()
            off = float((ours.float() - row).square().mean().sqrt() / row.std())
            worst = worst if off <= worst else off  # a NaN is the worst
            chunk.kv.commit(len(chunk.tokens))
    return worst


class _Recorder(KeysAndValues):
    """A cache that keeps only the shapes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, LayerKV] = {}
        self._dtype = torch.float32

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._seen[layer_idx] = LayerKV(*key_states.shape[1::2], *value_states.shape[1::2])
        self._dtype = key_states.dtype
        return key_states, value_states

    def layout(self, device: torch.device) -> KVLayout:
        if not self._seen or sorted(self._seen) != list(range(len(self._seen))):
            raise UnsupportedModel(f"of its layers only {sorted(self._seen)} keep keys and values")
        return KVLayout(tuple(self._seen[i] for i in range(len(self._seen))), self._dtype, device)


@contextmanager
def experts_bypassed(model: Any) -> Iterator[None]:
    """Within it the experts of the registry add nothing, so none is asked for and none need be in memory."""
    configured = getattr(model.config, "_experts_implementation", None)
    if configured is None:
        yield
        return
    model.set_experts_implementation(_BYPASS)
    try:
        yield
    finally:
        model.set_experts_implementation(configured)


def _no_experts(module: torch.nn.Module, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(hidden_states)


ALL_EXPERTS_FUNCTIONS.register(_BYPASS, _no_experts)
