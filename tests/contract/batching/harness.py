"""Tiny models of every family, their own answers to compare with, and a driver that steps an engine by hand."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from greenroom.core.generation import Event, Finished, GenerationRequest, SamplingParams, Token
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.policies.base.array_types import Scores
from tests.random_checkpoints import DECODER_ONLY, random_model

CASES = [
    (family, attention)
    for family in DECODER_ONLY
    for attention in ("sdpa", "eager")
    if (family, attention) != ("gpt_oss", "sdpa")
]
"""Every family with every attention that it has; gpt_oss has attention sinks and only its own function."""


def cases(families: Collection[str] = DECODER_ONLY) -> pytest.MarkDecorator:
    """Those of the ``families``. Of each one attention, every other one's the same; the other is marked ``full``."""
    chosen = {(family, ("sdpa", "eager")[number % 2]) for number, family in enumerate(DECODER_ONLY)}
    return pytest.mark.parametrize(
        ("family", "attention"),
        [
            pytest.param(*case, marks=() if case in chosen or case[0] == "gpt_oss" else pytest.mark.full)
            for case in CASES
            if case[0] in families
        ],
    )


SLIDING: dict[str, dict[str, Any]] = {
    "mixtral": {"sliding_window": 6},
    "phimoe": {"sliding_window": 6},
    "qwen3_moe": {"sliding_window": 6, "use_sliding_window": True},
    "qwen2_moe": {
        "sliding_window": 6,
        "use_sliding_window": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "gpt_oss": {"sliding_window": 6},
}
"""Windows shorter than most prompts here; qwen2_moe and gpt_oss have layers with and without."""

KV_BUDGET = 1 << 20


def _model(family: str, attention: str, dtype: torch.dtype, changes: tuple[tuple[str, Any], ...]) -> Any:
    model = random_model(family, dtype=dtype, **{key: _thaw(value) for key, value in changes})
    model.set_experts_implementation("eager")
    model.set_attn_implementation(attention)
    return model


def _freeze(changes: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in changes.items())


def _thaw(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@functools.lru_cache(maxsize=64)
def _ragged(family: str, attention: str, dtype: torch.dtype, changes: tuple[tuple[str, Any], ...]) -> RaggedModel:
    return RaggedModel(_model(family, attention, dtype, changes))


@functools.lru_cache(maxsize=64)
def _own(family: str, attention: str, dtype: torch.dtype, changes: tuple[tuple[str, Any], ...]) -> Any:
    return _model(family, attention, dtype, changes)


def ragged(
    family: str = "mixtral", attention: str = "sdpa", dtype: torch.dtype = torch.float32, **changes: Any
) -> RaggedModel:
    """A ragged model, the same object for the same arguments."""
    return _ragged(family, attention, dtype, _freeze(changes))


@functools.lru_cache(maxsize=4096)
def _generate(
    prompt: tuple[int, ...],
    tokens: int,
    family: str,
    attention: str,
    dtype: torch.dtype,
    changes: tuple[tuple[str, Any], ...],
) -> tuple[tuple[int, ...], torch.Tensor]:
    out = _own(family, attention, dtype, changes).generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return tuple(out.sequences[0, len(prompt) :].tolist()), torch.cat(out.logits)


def own(family: str, attention: str) -> Any:
    """transformers' own model in fp32, the same object for the same arguments."""
    return _own(family, attention, torch.float32, ())


def generate(
    prompt: Sequence[int],
    tokens: int,
    family: str = "mixtral",
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> tuple[int, ...]:
    """transformers' own greedy tokens."""
    return _generate(tuple(prompt), tokens, family, attention, dtype, _freeze(changes))[0]


def generate_logits(
    prompt: Sequence[int], tokens: int, family: str, attention: str, dtype: torch.dtype, **changes: Any
) -> torch.Tensor:
    """The logits ``[tokens, vocabulary]`` that they were picked from."""
    return _generate(tuple(prompt), tokens, family, attention, dtype, _freeze(changes))[1]


@contextmanager
def recorded(model: RaggedModel) -> Iterator[list[torch.Tensor]]:
    """The logits of every forward while it is open."""
    seen: list[torch.Tensor] = []

    def forward(chunks: Sequence[Chunk], paths: Scores | None = None) -> torch.Tensor:
        logits = RaggedModel.forward(model, chunks, paths)
        seen.append(logits)
        return logits

    model.forward = forward  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        del model.forward


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(
        torch.randint(3, 260, (length,), generator=torch.Generator().manual_seed(1000 * seed + length)).tolist()
    )


def request(name: str, prompt: Sequence[int], tokens: int = 8, **sampling: Any) -> GenerationRequest:
    """Greedy unless ``sampling`` says otherwise, and never ended by an end-of-sequence token unless asked."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling}
    return GenerationRequest(name, tuple(prompt), SamplingParams(**params))


@dataclass
class Answer:
    """What one request was told."""

    number: int = -1
    tokens: list[Token] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    def take(self, event: Event) -> None:
        assert self.finished is None, "an event after the last"
        if isinstance(event, Finished):
            self.finished = event
        else:
            assert event.index == len(self.tokens), "a gap"
            self.tokens.append(event)


class Driver:
    """Steps an engine and audits it after every step."""

    def __init__(self, model: RaggedModel, *, kv_budget: int = KV_BUDGET, **options: Any) -> None:
        names = (
            "max_model_len", "tokens_per_step", "max_running", "max_waiting", "prefill_chunk", "rows_per_forward",
            "plans_rounds",
        )  # fmt: skip
        limits = {key: options.pop(key) for key in names if key in options}
        if "tokens_per_step" in limits:
            limits.setdefault("max_running", min(64, limits["tokens_per_step"]))
        self.engine = BatchEngine(model, BatchConfig(kv_budget, **limits), **options)

    def add(self, asked: GenerationRequest, answer: Answer | None = None) -> Answer:
        answer = answer or Answer()
        sequence = self.engine.new_sequence(asked, answer.take)
        answer.number = sequence.number
        self.engine.add(sequence)
        return answer

    def step(self) -> bool:
        moved = self.engine.step()
        self.engine.audit()
        return moved

    def run(self, limit: int = 10_000) -> None:
        """Until nothing is left."""
        for _ in range(limit):
            if not self.step():
                break
        assert not self.engine.busy
        assert self.engine.kv.reserved_bytes == 0
