"""Predicts the next layers' picks by running their routers on the rows that the current layer's experts get.

Pre-gated MoE (Hwang et al., ISCA 2024) trains each layer's gate to choose for the next layer. The residual stream
changes little between layers, so a router that is run early sees nearly its later input. This gives most of the effect
without retraining. Maps that were fitted to the residual stream (``residual_maps``) foresee more, and answer in the
routers' place where there are any. It only predicts: the routers' real picks decide what is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from greenroom.experts.source import PredictsFor
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.kernels.device_copies import Download
from greenroom.moe.native.rows import NativeRows
from greenroom.moe.routing.residual_maps import ResidualMaps, chances
from greenroom.moe.routing.routers import find_router
from greenroom.policies.base.array_types import Scores
from greenroom.policies.base.events import ROUTER, Prediction, PredictionRequest

log = logging.getLogger(__name__)

_PROBES = 16
_TINY = 1e-15  # quotients of numbers between this and its inverse are finite


class _Gate(NamedTuple):
    """One layer's router: its family's own forward, without greenroom's wrapper."""

    module: Any
    top_k: int
    norm: Any  # a module with a weight and perhaps a bias, or None
    experts: int
    plain: bool = False  # it picks the largest of the logits, which are one linear map of the rows
    native: NativeRows | None = None  # computes the logits of a plain one

    def outputs(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[T, experts]`` and picks ``[T, k]``."""
        logits, _, picks = type(self.module).forward(self.module, rows)
        return logits, picks

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """The logits alone, of a plain router. By the compiled products where there are any: torch wakes its threads
        even for a small router, and their cores may be busy reading experts."""
        weight, bias = self.module.weight, getattr(self.module, "bias", None)
        if self.native is not None and rows.dtype is torch.bfloat16 and rows.is_contiguous():
            return self.native.linear(rows, weight, bias)
        return nn.functional.linear(rows, weight, bias)

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """The input of ``weights``, on the rows' device: logits ``[T, experts]``, of a plain router in its own dtype.
        If the picks are not simply the largest logits, the picks ``[T, k]`` follow them.
        """
        if self.plain:
            return self.logits(rows).detach()
        logits, picks = self.outputs(rows)
        return torch.cat([logits.detach().float(), picks.float()], dim=1)

    def weights(self, scores: Scores) -> Scores:
        """``[T, experts]``: see LookAhead."""
        if self.plain:
            return _around_the_boundary(scores, self.top_k)
        logits, picks = scores[:, : -self.top_k], scores[:, -self.top_k :]
        return _picks_first(_around_the_boundary(logits, self.top_k), picks.astype(np.int64))


class _Part(NamedTuple):
    """Of some layers' answer: ``scores[T, columns]`` on the rows' device, and what makes weights of them in RAM.

    ``gate``: of one layer's router. Several that are plain and alike make their weights in one go.
    """

    scores: torch.Tensor
    weights: Callable[[Scores], Scores]
    gate: _Gate | None = None

    @property
    def kind(self) -> tuple[int, int] | None:
        gate = self.gate
        return None if gate is None or not gate.plain else (gate.experts, gate.top_k)


class LookAhead:
    """Answers requests for predictions of the kind ``router`` while a layer's experts are on their way.

    Values are ``[T, M]`` for the rows of the step, between 0 and 1. Experts that the router would pick are above 1/2.
    The value depends on the logit's distance from the boundary between the picked and the other experts. Where maps of
    the residual stream are in ``use``, they answer in the routers' place, for the layers that they foresee: values are
    chances then.

    On the CPU the answer is given at once. From a device it is copied while the layer's experts are queued, and given
    once it has arrived; no thread waits for it. A new answer replaces one that has not arrived.
    """

    def __init__(self, gates: list[_Gate], source: PredictsFor) -> None:
        self._gates = gates
        self._source = source
        self._maps: ResidualMaps | None = None
        self._renorms: dict[tuple[int, int], _Renorm | None] = {}
        self._pending: tuple[PredictionRequest, Download, list[_Part]] | None = None

    def use(self, maps: ResidualMaps | None) -> None:
        """From the next request on. Of the same model: see ``residual_maps.check_fits``."""
        self._maps = maps

    def __call__(self, layer: int, rows: torch.Tensor) -> None:
        """The experts of ``layer`` get these ``rows[T, H]``. Answers the policy's request, if there is one."""
        request = self._source.take_request(ROUTER)
        if request is None:
            return
        parts = self._parts(layer, *request.layers, rows)
        scores = (torch.cat([part.scores for part in parts], dim=1) if len(parts) > 1 else parts[0].scores).float()
        if rows.device.type == "cpu":
            self._give(request, parts, scores.numpy())
        else:
            self._pending = request, Download(scores, self._source.mark), parts

    def answer(self) -> None:
        """Give the answer that is copied from a device, if it has arrived."""
        if self._pending is None:
            return
        request, download, parts = self._pending
        scores = download.take()
        if scores is None:
            return
        self._pending = None
        self._give(request, parts, scores.numpy())

    def _parts(self, layer: int, start: int, stop: int, rows: torch.Tensor) -> list[_Part]:
        """What foresees the layers ``[start, stop)``, in their order."""
        targets = range(0) if self._maps is None else self._maps.targets(layer)
        mapped = range(max(start, targets.start), min(stop, targets.stop))
        parts = []
        for ahead in range(start, stop):
            if ahead not in mapped:
                gate = self._gates[ahead]
                parts.append(_Part(self.scores(layer, ahead, rows), gate.weights, gate))
            elif ahead == mapped.start:
                assert self._maps is not None
                parts.append(_Part(self._maps.logits(layer, mapped.start, mapped.stop, rows), chances))
        return parts

    def _give(self, request: PredictionRequest, parts: Sequence[_Part], scores: Scores) -> None:
        """``scores[T, columns]``: of all parts, one behind the other."""
        first = parts[0]
        if len(parts) == 1:
            values = first.weights(scores)
        elif first.kind is not None and all(part.kind == first.kind for part in parts):
            experts, top_k = first.kind
            values = _around_the_boundary(scores.reshape(-1, experts), top_k).reshape(scores.shape)
        else:
            ends = np.cumsum([part.scores.shape[1] for part in parts])
            own = np.split(scores, ends[:-1], axis=1)
            values = np.concatenate([part.weights(each) for part, each in zip(parts, own, strict=True)], axis=1)
        self._source.predicted(Prediction(request, "", values))

    def weights(self, layer: int, ahead: int, rows: torch.Tensor) -> Scores:
        """``[T, experts of layer ahead]``: how probable each expert of the layer ``ahead`` is. Waits for the device."""
        return self._gates[ahead].weights(self.scores(layer, ahead, rows).float().cpu().numpy())

    def scores(self, layer: int, ahead: int, rows: torch.Tensor) -> torch.Tensor:
        """The output of the gate of ``ahead`` for ``rows[T, H]`` of ``layer``."""
        if (layer, ahead) not in self._renorms:
            self._renorms[layer, ahead] = _renorm(self._gates[layer].norm, self._gates[ahead].norm)
        renorm = self._renorms[layer, ahead]
        return self._gates[ahead].scores(rows if renorm is None else renorm(rows))


class _Renorm(NamedTuple):
    """Turns one layer's normalised rows into those that another layer's norm would give for the same residual stream.

    A norm scales (and may shift) normalised rows by its own weights. These are exchanged.
    """

    scale: torch.Tensor
    shift: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale if self.shift is None else rows * self.scale + self.shift


def _renorm(here: Any, there: Any) -> _Renorm | None:
    if here is None or there is None:
        return None
    scale = there.weight.float() / here.weight.float()
    shift = None
    if getattr(here, "bias", None) is not None:
        shift = (there.bias.float() - here.bias.float() * scale).to(here.weight.dtype)
    return _Renorm(scale.to(here.weight.dtype), shift)


def _around_the_boundary(logits: Scores, count: int) -> Scores:
    """The logistic function of each logit's distance from the middle between the ``count`` largest and the others."""
    experts = logits.shape[1]
    if count >= experts:
        return np.ones_like(logits)
    ranked = np.partition(logits, (experts - count - 1, experts - count), axis=1)
    above = logits - (ranked[:, experts - count - 1, None] + ranked[:, experts - count, None]) / 2
    weights: Scores = np.reciprocal(1 + np.exp(-np.maximum(above, np.float32(-50))))
    return weights


def _picks_first(weights: Scores, picks: NDArray[np.int64]) -> Scores:
    """Puts the picks above 1/2 for families that pick by more than logits (groups, correction biases)."""
    chosen = np.zeros(weights.shape, dtype=np.bool_)
    np.put_along_axis(chosen, picks, True, axis=1)
    return np.where(chosen, np.maximum(weights, np.float32(0.501)), np.minimum(weights, np.float32(0.499)))


def look_ahead_of(
    model: Any,
    layers: tuple[MoeLayer, ...],
    source: object,
    *,
    native: NativeRows | None = None,
    exchange_norms: bool = True,
) -> LookAhead | None:
    """The provider for a model on ``source``. None: the source does not ask, or the model's routers can not be run on
    other layers' rows, which is then logged. ``native``: the compiled products of the model. Without ``exchange_norms``
    rows are used as they are.
    """
    if not isinstance(source, PredictsFor) or ROUTER not in source.asks:
        return None
    gates = [_gate(model, layer) for layer in layers]
    found = [gate for gate in gates if gate is not None]
    if len(found) < len(gates):
        log.warning(
            "no look-ahead: the routers of %s can not be run ahead of their layers; the policy goes on without",
            model.config.model_type,
        )
        return None
    found = [gate._replace(native=native) if _is_compiled(gate) else gate for gate in found]
    if model.get_input_embeddings().weight.device.type == "cpu":
        source.answers_at_once(ROUTER)
    return LookAhead([gate if exchange_norms else gate._replace(norm=None) for gate in found], source)


def _gate(model: Any, layer: MoeLayer) -> _Gate | None:
    router = find_router(model, layer) if layer.stacked else None
    if router is None:
        return None
    gate = _Gate(router.module, layer.top_k, _norm_before(model, layer), layer.experts)
    embedding = model.get_input_embeddings().weight
    shape = (_PROBES, model.config.get_text_config().hidden_size)
    probes = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(embedding.device, embedding.dtype)
    try:
        with torch.inference_mode():
            logits, picks = gate.outputs(probes)
    except Exception:
        return None
    if logits.shape != (_PROBES, layer.experts) or picks.shape != (_PROBES, layer.top_k):
        return None
    return gate._replace(plain=_is_plain(gate, probes, logits, picks))


def _is_plain(gate: _Gate, probes: torch.Tensor, logits: torch.Tensor, picks: torch.Tensor) -> bool:
    weight = getattr(gate.module, "weight", None)
    if weight is None or weight.dtype != probes.dtype or weight.shape != (logits.shape[1], probes.shape[1]):
        return False
    with torch.inference_mode():
        own = gate.logits(probes)
    if not torch.equal(own.float(), logits.float()):
        return False
    largest = own.float().topk(gate.top_k, dim=-1)
    return torch.equal(own.float().gather(1, picks).sort(dim=-1).values, largest.values.sort(dim=-1).values)


def _is_compiled(gate: _Gate) -> bool:
    """Whether the compiled products can compute its logits."""
    if not gate.plain:
        return False
    weight, bias = gate.module.weight, getattr(gate.module, "bias", None)
    parts = [weight] if bias is None else [weight, bias]
    bf16 = all(part.dtype is torch.bfloat16 and part.device.type == "cpu" and part.is_contiguous() for part in parts)
    return bf16 and weight.shape[1] % 2 == 0


def _can_be_exchanged(weight: torch.Tensor) -> bool:
    """Whether scaling by this weight can be undone. Computed once, because reading from a device blocks."""
    sizes = weight.detach().float().abs()
    return bool(((sizes > _TINY) & (sizes < 1 / _TINY)).all())


def _norm_before(model: Any, layer: MoeLayer) -> Any:
    """The norm before a layer's router, if it scales by its weight as RMS and layer norms do."""
    norm = getattr(
        model.get_submodule(layer.name.rpartition(".")[0].rpartition(".")[0]), "post_attention_layernorm", None
    )
    weight = getattr(norm, "weight", None)
    if norm is None or weight is None or weight.ndim != 1 or not _can_be_exchanged(weight):
        return None
    signs = torch.ones_like(weight)
    signs[::2] = -1  # mean 0, variance 1: normalising changes nothing
    bias = getattr(norm, "bias", None)
    expected = signs * weight if bias is None else signs * weight + bias
    with torch.inference_mode():
        return norm if torch.allclose(norm(signs[None])[0].float(), expected.float(), rtol=2e-2, atol=1e-3) else None
