"""The fast training forward is transformers' own function, values and gradients."""

from __future__ import annotations

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from greenroom.demo.train import ragged_forward as ragged


def _model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        norm_topk_prob=True,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return Qwen3MoeForCausalLM(config)


_ROWS = [[3, 4, 5], [7, 8, 9, 10, 11, 12, 13], [1, 2], [30, 31, 32, 33, 34], [20]]


def test_hidden_states_and_gradients_equal_transformers() -> None:
    model = _model()
    batch = ragged.lay_flat(_ROWS)
    out = ragged.forward(model, batch)
    hidden, balance = out.hidden, out.balance
    probe = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    torch.autograd.backward((hidden * probe).sum())
    ours = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    rows = [model.model(input_ids=torch.tensor([row])).last_hidden_state[0] for row in _ROWS]
    theirs = torch.cat(rows)
    torch.autograd.backward((theirs * probe).sum())

    torch.testing.assert_close(hidden, theirs, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-4, msg=name)
    assert balance.shape == (2,)
    logits = [model.model(input_ids=torch.tensor([row]), output_router_logits=True).router_logits for row in _ROWS]
    for layer in range(2):
        theirs = torch.cat([row[layer] for row in logits]).softmax(-1)
        torch.testing.assert_close(out.router[layer], theirs, rtol=1e-4, atol=1e-5)
    assert (balance > 0.5).all()


def test_balance_loss_tells_a_collapsed_layer_from_a_balanced_one() -> None:
    model = _model()
    batch = ragged.lay_flat(_ROWS)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.zero_()
        model.model.layers[1].mlp.gate.weight.mul_(100)
    balance = ragged.forward(model, batch).balance
    assert abs(balance[0].item() - 1.0) < 1e-5
    assert balance[1].item() > 1.02


def test_group_information_counts_the_bits_that_an_expert_tells() -> None:
    apart = torch.tensor([[1.0, 0, 0, 0], [1, 0, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]])
    alike = torch.full((4, 4), 0.25)
    router, groups = torch.stack((apart, alike)), torch.tensor([0, 0, 1, -1])
    bits = ragged.group_information(router, groups, 3)
    torch.testing.assert_close(bits, torch.tensor([1.0, 0.0]), atol=1e-5, rtol=0)
    assert ragged.group_information(router, torch.tensor([0, 1, 0, 1]), 2)[0] < 0.9
