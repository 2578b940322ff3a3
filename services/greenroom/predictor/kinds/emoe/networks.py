"""The predictors themselves: a transformer whose sequence is the model's layers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, XLNetConfig, XLNetModel

from greenroom.core.artifacts.forecast_kinds import EMOE_L
from greenroom.core.tensors import Damaged
from greenroom.predictor.kinds.emoe.artifact import Architecture, LearnedArtifact
from greenroom.predictor.traces.counts import Floats

_DROPOUT = 0.1
_EPSILON = 1e-4
_WIDTHS_OF_FF = 2
_REACH = 10.0
"""How much faster ``shift`` is learnt than other parameters: no other number says as much."""


class ExpertNetwork(nn.Module):
    """Says what is to be added to the logarithm of the priors. Before training it adds nothing.

    Position l stands for layer l. Its input is the task type, and how one layer's picks spread over the experts, as a
    difference from all task types together. With eMoE-A that is layer l of the previous prompt. With eMoE-L it is layer
    l - 1 of the prompt itself, and at position 0 the first layer of the previous prompt. eMoE-L sees no position after
    its own.
    """

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        self.architecture = one = architecture
        self.causal = one.kind == EMOE_L
        self.enter = nn.Linear(2 * one.experts, one.width)
        self.layer = nn.Embedding(one.layers, one.width)
        self.task = nn.Embedding(one.tasks, one.width)
        self.backbone = backbone(one, causal=self.causal)
        self.norm = nn.LayerNorm(one.width)
        self.leave = nn.Linear(one.width, one.slots * one.experts)
        self.shift = nn.Parameter(torch.zeros(1 if self.causal else one.layers))
        """How far each layer follows the previous prompt's own layer."""
        for embedding in (self.layer, self.task):
            nn.init.normal_(embedding.weight, std=0.02)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, given: Tensor, usual: Tensor, prior: Tensor, slots: Tensor, task: Tensor) -> Tensor:
        """Logits [n, l, k, experts] of the first l layers.

        ``given``: [n, l, experts], what each position is told; ``usual``: [n, l, experts], each layer's picks over all
        task types; ``prior``: [n, l, k, experts]; ``slots``: [l, k]; ``task``: [n], numbers.
        """
        count, length, experts = given.shape
        expected = torch.einsum("nlke,lk->nle", prior, slots)
        told_of = shifted(usual, usual) if self.causal else usual
        seen = torch.cat([_unlike(given, told_of), _unlike(expected, usual)], dim=-1)
        hidden = self.enter(seen) + self.layer.weight[:length] + self.task(task)[:, None]
        hidden = self.norm(self.backbone(inputs_embeds=hidden).last_hidden_state)
        logits = torch.log(prior) + self.leave(hidden).view(count, length, -1, experts)
        reach = 1 if self.causal else length
        moved = torch.log((given[:, :reach] + _EPSILON) / (expected[:, :reach] + _EPSILON))
        first = logits[:, :reach] + (_REACH * self.shift[:reach, None] * moved)[:, :, None]
        return first if reach == length else torch.cat([first, logits[:, reach:]], dim=1)


def _unlike(shares: Tensor, usual: Tensor) -> Tensor:
    """About 1 in size, however many experts there are."""
    unlike: Tensor = (shares.sqrt() - usual.sqrt()) * shares.shape[-1] ** 0.5
    return unlike


def backbone(one: Architecture, *, causal: bool) -> nn.Module:
    """GPT-2 is causal either way."""
    inner = _WIDTHS_OF_FF * one.width
    made: nn.Module
    if one.backbone == "xlnet":
        made = XLNetModel(
            XLNetConfig(
                vocab_size=1, d_model=one.width, n_layer=one.depth, n_head=one.heads, d_inner=inner, dropout=_DROPOUT,
                attn_type="uni" if causal else "bi", mem_len=None, use_mems_eval=False,
                pad_token_id=0, bos_token_id=0, eos_token_id=0,
            )
        )  # fmt: skip
    elif one.backbone == "gpt2":
        made = GPT2Model(
            GPT2Config(
                vocab_size=1, n_embd=one.width, n_layer=one.depth, n_head=one.heads, n_inner=inner,
                n_positions=one.layers, use_cache=False, bos_token_id=0, eos_token_id=0, attn_implementation="eager",
            )
        )  # fmt: skip
    else:
        made = BertModel(
            BertConfig(
                vocab_size=1, hidden_size=one.width, num_hidden_layers=one.depth, num_attention_heads=one.heads,
                intermediate_size=inner, max_position_embeddings=one.layers, type_vocab_size=1, is_decoder=causal,
                use_cache=False, pad_token_id=0, attn_implementation="eager",
            ),
            add_pooling_layer=False,
        )  # fmt: skip
    return made


def shifted(previous: Tensor, layers: Tensor) -> Tensor:
    """The input of eMoE-L: the previous prompt's first layer, then the prompt's own layers, each one position later."""
    return torch.cat([previous[:, :1], layers[:, :-1]], dim=1)


def by_slot(
    network: ExpertNetwork, previous: Tensor, usual: Tensor, prior: Tensor, slots: Tensor, task: Tensor
) -> Tensor:
    """[n, layers, k, experts]: the next prompt's distributions, after the ``previous`` ones [n, layers, experts].

    ``usual``: [layers, experts]; ``prior``: [n, layers, k, experts]. eMoE-L is fed what it predicted itself.
    """
    usual = usual.expand_as(previous)
    if not network.causal:
        shares: Tensor = network(previous, usual, prior, slots, task).softmax(dim=-1)
        return shares
    told = previous[:, :1]
    predicted: list[Tensor] = []
    for length in range(1, previous.shape[1] + 1):
        logits = network(told, usual[:, :length], prior[:, :length], slots[:length], task)
        predicted.append(logits[:, -1].softmax(dim=-1))
        layer = torch.einsum("nke,k->ne", predicted[-1], slots[length - 1])
        told = torch.cat([told, layer[:, None]], dim=1)
    return torch.stack(predicted, dim=1)


class LearnedPredictor:
    """An artifact, ready to forecast from. Not for two threads at once."""

    def __init__(self, artifact: LearnedArtifact) -> None:
        """Raises Damaged where the weights are not those of the architecture."""
        self.artifact = artifact
        self._network = ExpertNetwork(artifact.architecture)
        try:
            weights = {name: torch.from_numpy(np.array(array)) for name, array in artifact.weights.items()}
            self._network.load_state_dict(weights)
        except RuntimeError as error:
            raise Damaged(f"its weights are not those of its architecture: {str(error)[:200]}") from error
        if not all(bool(torch.isfinite(one).all()) for one in weights.values()):
            raise Damaged("its weights are not all numbers")
        self._network.eval()
        self._prior = torch.from_numpy(np.array(artifact.priors.by_slot))
        self._slots = torch.from_numpy(np.array(artifact.priors.slots))
        self._popularity = torch.from_numpy(artifact.priors.by_layer)

    def forecast(self, task_type: str, previous: Floats | None) -> Floats:
        """float32[layers, experts], rows of sum 1. Without a previous prompt, after what is usual of the task
        type."""
        found = self.forecasts([task_type], None if previous is None else previous[None])[0]
        layers: Floats = np.einsum("lke,lk->le", found, self.artifact.priors.slots)
        layers /= layers.sum(axis=-1, keepdims=True)
        return layers.astype(np.float32)

    def forecasts(self, task_types: list[str], previous: Floats | None) -> Floats:
        """[n, layers, k, experts], for so many prompts at once; ``previous``: [n, layers, experts]."""
        task = torch.tensor([self.artifact.priors.number(one) for one in task_types])
        before = self._popularity[task] if previous is None else torch.from_numpy(np.array(previous, np.float32))
        with torch.inference_mode():
            prior = self._prior[task]
            found = by_slot(self._network, before, self._popularity[0], prior, self._slots, task)
        shares: Floats = found.numpy()
        return shares


def weights_of(network: ExpertNetwork) -> dict[str, Any]:
    return {name: one.detach().numpy().copy() for name, one in network.state_dict().items()}
