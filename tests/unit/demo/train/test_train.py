"""Training on a micro configuration: it learns, goes on where it stopped, and saves a real checkpoint."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from greenroom.core.errors import InvalidConfig
from greenroom.demo.tokenizer import ASSISTANT_ID, END_ID, train_tokenizer
from greenroom.demo.train.batches import Settings, answer_spans, to_batch, training_rows
from greenroom.demo.train.trainer import Trainer, train

_MICRO = Settings(
    steps=6, tokens=200, vocab=400, hidden=16, layers=2, heads=2, kv_heads=1, experts=4, width=8, warmup=2, echo_steps=3
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(_MICRO.vocab, seed=0, samples_per_task=100)


@pytest.fixture(autouse=True)
def _quick_tokenizer(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("greenroom.demo.train.trainer.train_tokenizer", lambda *args, **kwargs: tokenizer)


def test_answer_spans_hold_the_reply_and_its_end() -> None:
    row = [1, 4, 9, END_ID, ASSISTANT_ID, 7, 8, END_ID, 4, 9, END_ID, ASSISTANT_ID, 6, END_ID]
    assert list(answer_spans(row)) == [(5, 8), (12, 14)]


def test_loss_looks_at_whole_answers_weighed_by_length() -> None:
    row = [1, 4, 9, END_ID, ASSISTANT_ID, 7, 8, END_ID]
    batch = to_batch([(row, 3), (row, -1)], 0.0)
    assert batch.targets.tolist() == [7, 8, END_ID] * 2
    assert batch.at.tolist() == [4, 5, 6, 12, 13, 14]
    assert torch.allclose(batch.weights, torch.full((6,), 1 / math.sqrt(3)))
    assert batch.tasks.tolist() == [3] * 8 + [-1] * 8
    assert batch.inside.tolist() == ([False] * 5 + [True] * 3) * 2
    assert len(to_batch([(row, 0)], 0.1).targets) > 3


def test_batches_follow_from_seed_and_step(tokenizer: Tokenizer) -> None:
    assert training_rows(tokenizer, _MICRO, 4) == training_rows(tokenizer, _MICRO, 4)
    assert training_rows(tokenizer, _MICRO, 4) != training_rows(tokenizer, _MICRO, 5)
    assert training_rows(tokenizer, replace(_MICRO, seed=1), 4) != training_rows(tokenizer, _MICRO, 4)
    assert sum(len(row) for row, _ in training_rows(tokenizer, _MICRO, 4)) >= _MICRO.tokens


def test_the_forward_sees_bf16_weights_and_learns(tokenizer: Tokenizer) -> None:
    trainer = Trainer(replace(_MICRO, learning_rate=1e-2), tokenizer)
    try:
        losses = [trainer.step(0.0)[0] for _ in range(12)]
        for name, parameter in trainer.model.named_parameters():
            assert torch.equal(parameter, parameter.to(torch.bfloat16).float()), name
    finally:
        trainer.close()
    assert losses[-1] < losses[0] - 0.5


def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path: Path, tokenizer: Tokenizer) -> None:
    train(_MICRO, tmp_path / "whole", progress=False)
    halfway = Trainer(_MICRO, tokenizer)
    for step in range(3):
        halfway.step(step / _MICRO.steps)
    halfway.save_checkpoint(tmp_path / "parts" / ".training")
    halfway.close()
    summary = train(_MICRO, tmp_path / "parts", progress=False)
    assert summary["steps"] == _MICRO.steps
    whole, parts = (tmp_path / name / "model.safetensors" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    further = train(replace(_MICRO, steps=8), tmp_path / "parts", progress=False)
    assert further["steps"] == 8
    assert [line.split("--steps ")[1].split()[0] for line in further["command"].splitlines()] == ["6", "8"]
    with pytest.raises(InvalidConfig, match="other settings"):
        train(replace(_MICRO, seed=3), tmp_path / "parts", progress=False)


def test_what_is_saved_is_a_plain_hugging_face_checkpoint(tmp_path: Path) -> None:
    train(_MICRO, tmp_path, progress=False)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert {file.get_tensor(name).dtype for name in names} == {torch.bfloat16}
    for projection in ("gate_proj", "up_proj", "down_proj"):
        assert f"model.layers.1.mlp.experts.3.{projection}.weight" in names
    assert "lm_head.weight" not in names  # tied
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["num_experts"] == _MICRO.experts
    assert config["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.generation_config.eos_token_id == END_ID == AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    assert model.config.num_experts == _MICRO.experts
