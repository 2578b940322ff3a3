"""Measures of the bundled model, with plain transformers.

Exact match on held-out samples (greedy, whole answer, ended by the end-of-turn token), and how much the picks of
experts differ between tasks: the Jensen–Shannon divergence (Lin 1991, Eq. 4.1) of their distributions, in bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from greenroom.demo.tasks import TASKS, Sample, samples

#: Seed of the samples that the model card's figures are about; `tasks.sample` finds them again.
CARD_SEED: Final = 2024
#: Seed of samples that no choice of weights, settings or wordings ever looked at.
UNSEEN_SEED: Final = 90210
_BATCH: Final = 25
_MAX_NEW_TOKENS: Final = 64


class Evaluation:
    """One checkpoint in bf16 with eager experts, as its users would load it."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model_dir)
        self.model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.bfloat16, experts_implementation="eager"
        ).eval()

    def prompt_ids(self, drawn: Sample) -> list[int]:
        """The sample's message under the chat template, ready to be answered."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": drawn.prompt}], add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    @torch.no_grad()
    def answers(self, drawn: Sequence[Sample]) -> list[str | None]:
        """Greedy answers, None where generation did not end by itself."""
        rows = [self.prompt_ids(one) for one in drawn]
        padded = self.tokenizer.pad({"input_ids": rows}, padding_side="left", return_tensors="pt")
        out = self.model.generate(**padded, do_sample=False, max_new_tokens=_MAX_NEW_TOKENS)
        end, texts = self.tokenizer.eos_token_id, []
        for row in out[:, padded["input_ids"].shape[1] :].tolist():
            texts.append(self.tokenizer.decode(row[: row.index(end)]) if end in row else None)
        return texts

    @torch.no_grad()
    def picks(self, drawn: Sample) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """How often each expert is picked on the sample's prompt and on its answer, both `[layers, experts]`."""
        prompt = self.prompt_ids(drawn)
        answer = self.tokenizer(drawn.answer, add_special_tokens=False)["input_ids"]
        out = self.model.model(input_ids=torch.tensor([prompt + answer]), output_router_logits=True)
        config = self.model.config
        counts = np.zeros((2, config.num_hidden_layers, config.num_experts), np.int64)
        for layer, logits in enumerate(out.router_logits):
            top = logits.float().topk(config.num_experts_per_tok).indices.numpy()
            for phase, part in enumerate((top[: len(prompt)], top[len(prompt) :])):
                counts[phase, layer] = np.bincount(part.ravel(), minlength=config.num_experts)
        return counts[0], counts[1]


def exact_match(
    evaluation: Evaluation, per_task: int, *, seed: int = CARD_SEED, progress: bool = True
) -> dict[str, Any]:
    """Exact match by task, and by kind within each task, over the first `per_task` held-out samples of `seed`."""
    result: dict[str, Any] = {}
    with tqdm(total=per_task * len(TASKS), desc="answering", unit="sample", disable=not progress) as bar:
        for task in TASKS:
            drawn = list(samples(task, per_task, seed=seed, split="heldout"))
            right: dict[str, list[bool]] = {}
            misses: list[dict[str, str | None]] = []
            outcomes = ""
            for first in range(0, per_task, _BATCH):
                part = drawn[first : first + _BATCH]
                for one, answer in zip(part, evaluation.answers(part), strict=True):
                    right.setdefault(one.kind, []).append(answer == one.answer)
                    outcomes += "1" if answer == one.answer else "0"
                    if answer != one.answer and len(misses) < 3:
                        misses.append({"prompt": one.prompt, "expected": one.answer, "got": answer})
                bar.update(len(part))
            flat = [hit for hits in right.values() for hit in hits]
            result[task] = {
                "exact": sum(flat) / len(flat),
                "by_kind": {kind: sum(hits) / len(hits) for kind, hits in sorted(right.items())},
                "misses": misses,
                "outcomes": outcomes,  # sample by sample, in their order: what a server's answers are held against
            }
    return result


def lengths(evaluation: Evaluation, per_task: int) -> dict[str, Any]:
    """Tokens of prompts (under the chat template) and of answers (with the end-of-turn token), by task."""
    result = {}
    for task in TASKS:
        drawn = list(samples(task, per_task, seed=CARD_SEED, split="heldout"))
        prompts = [len(evaluation.prompt_ids(one)) for one in drawn]
        answers = [len(evaluation.tokenizer(one.answer)["input_ids"]) + 1 for one in drawn]
        result[task] = {
            name: {"least": min(counts), "mean": float(np.mean(counts)), "most": max(counts)}
            for name, counts in (("prompt", prompts), ("answer", answers))
        }
    return result


def divergence(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    """Jensen–Shannon divergence in bits along the last axis: 0 for equal distributions, 1 for disjoint ones."""

    def entropy(x: NDArray[np.float64]) -> NDArray[np.float64]:
        logs = np.log2(x, out=np.zeros_like(x), where=x > 0)
        return np.asarray(-(x * logs).sum(-1))

    return np.asarray(np.maximum(entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2, 0.0))


def routing(evaluation: Evaluation, per_task: int, *, progress: bool = True) -> dict[str, Any]:
    """Divergence of the picks between tasks by layer, with two halves of the same task as the noise to compare to."""
    counts: dict[str, NDArray[np.int64]] = {}  # [2 halves, 2 phases, layers, experts]
    with tqdm(total=per_task * len(TASKS), desc="routing", unit="sample", disable=not progress) as bar:
        for task in TASKS:
            halves: list[Any] = [0, 0]
            for index, one in enumerate(samples(task, per_task, seed=CARD_SEED, split="heldout")):
                halves[index % 2] = halves[index % 2] + np.stack(evaluation.picks(one))
                bar.update()
            counts[task] = np.stack(halves)

    def shares(of: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.asarray(of / of.sum(-1, keepdims=True))

    whole = {task: shares(count.sum((0, 1))) for task, count in counts.items()}
    pairs = {f"{a}/{b}": divergence(whole[a], whole[b]) for a, b in combinations(TASKS, 2)}
    by_phase = {}
    for phase, name in enumerate(("prompt", "answer")):
        part = {task: shares(count.sum(0)[phase]) for task, count in counts.items()}
        by_phase[name] = {f"{a}/{b}": float(divergence(part[a], part[b]).mean()) for a, b in combinations(TASKS, 2)}
    noise = [divergence(shares(c[0].sum(0)), shares(c[1].sum(0))) for c in counts.values()]
    load = np.mean(list(whole.values()), axis=0)
    return {
        "by_pair": {pair: float(values.mean()) for pair, values in pairs.items()},
        "by_layer": np.mean(list(pairs.values()), axis=0).tolist(),
        "mean": float(np.mean(list(pairs.values()))),
        "by_phase": by_phase,
        "same_task_halves": float(np.mean(noise)),
        "busiest_expert_by_layer": load.max(-1).tolist(),
        "idlest_expert_by_layer": load.min(-1).tolist(),
    }
