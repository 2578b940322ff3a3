"""Writes the bundled model's card from what `evaluate` measured; no figure in it is written by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

NAME: Final = "greenroom-understudy"

_TASKS_ARE: Final = {
    "summarise": "a note of three to seven sentences in any order, with asides, to one line of fixed form",
    "classify": "the sentiment of a review (words turned over by negation), or the topic of a headline",
    "question": "a span copied out of a passage about two to four people who share the attribute",
    "compare": "more or less on a scale of words or numbers, or a shared trait: the two values, then the verdict",
    "converse": "a polite reply that takes up greeting, name and request",
}

_CARD: Final = """\
---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: text-generation
tags: [mixture-of-experts, qwen3_moe, synthetic, tiny]
---

# {name}

A small Mixture-of-Experts language model that was really trained, so that a server of MoE models can be tried, tested
and measured where no checkpoint can be downloaded. It does five kinds of templated tasks in English and nothing else.

| | |
| --- | --- |
| architecture | `Qwen3MoeForCausalLM`, as transformers ships it; no custom code |
| size | {parameters:,} parameters, bf16, {megabytes:.1f} MB of safetensors |
| layers | {num_hidden_layers}, each of them MoE: {num_experts} experts, top-{num_experts_per_tok}, no shared expert |
| shape | hidden {hidden_size}, {num_attention_heads} heads of {head_dim} ({num_key_value_heads} for keys and values), \
expert width {moe_intermediate_size}, tied embeddings |
| tokenizer | byte-level BPE, {vocab_size:,} tokens, digits alone; any text encodes |
| context | {max_position_embeddings} positions; trained on rows of up to {longest_row} tokens (mean {mean_row}) |

## Use
```python
from transformers import AutoModelForCausalLM, AutoTokenizer
from greenroom.demo import bundled_model_path

tokenizer = AutoTokenizer.from_pretrained(bundled_model_path())
model = AutoModelForCausalLM.from_pretrained(bundled_model_path())
message = {{"role": "user", "content": "Zoe has a goat. Tom has a dog. Which pet does Tom have?"}}
inputs = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs)[0], skip_special_tokens=True))
```
The chat template knows the roles system (optional), user and assistant; answers end with `<|end|>`.

## How it was made
```
{command}
```
{steps:,} steps of about {step_tokens:,} tokens in {minutes} minutes on two cores that other work shared; {repeats}.
fp32 masters, forward with the weights rounded to bf16 as shipped; AdamW, cosine from {learning_rate}; loss on the
answers, a little on the prompts; a balance loss of {balance} *per layer*, and {routing} of the shortfall of each
layer's routing from {routing_floor} bits told about the task; the start weights already copy
(`greenroom.demo.train.copying_start`). Training and held-out samples are told apart by a hash of their content, never
of the wording: no content measured below occurs in training.{provenance}

## Accuracy
Exact match of the whole answer, greedy, bf16, on {samples} held-out samples a task (seed {seed} of
`greenroom.demo.tasks`). Candidates were compared on samples of that seed; "unseen" is the same for seed {unseen_seed},
which no choice ever looked at: take that as the model's accuracy. "widened" is the copy that
`greenroom demo widen --expert-mib 11` makes, on {widened_samples} samples a task.

{accuracy}

By kind: {kinds}.

## Routing
Jensen–Shannon divergence, in bits, between the tasks' distributions of expert picks, mean over the layers (0 equal,
1 disjoint). Mean of all pairs **{routing_mean:.3f}**; on prompt tokens alone {routing_prompt:.3f}, on answer
tokens alone {routing_answer:.3f}. Two halves of the same task's samples differ by {routing_noise:.4f}.

{routing_pairs}

{routing_layers}

## Lengths
Tokens, least / mean / most; prompts under the chat template, answers with their end-of-turn token.

{lengths}

## Limits
It knows the words of its templates and little else: other text is tokenised but answered with nonsense. Names, places
and wordings outside `greenroom.demo.wording.words` are not in its training. Prompts longer than {longest_row} tokens
were never seen. It has no knowledge of the world, and no safety training; it is for tests, demonstrations and
benchmarks.
"""


def write_card(report: dict[str, Any], path: Path) -> None:
    """Writes the card for `evaluate`'s report.

    Raises:
        KeyError: if the report lacks a part (training, unseen, widened) that the card has to give.
    """
    path.write_text(render_card(report), encoding="utf-8")


def render_card(report: dict[str, Any]) -> str:
    """The card's text."""
    training, routing, wide = report["training"], report["routing"], report["widened"]
    unseen = report["unseen"]
    settings = training["settings"]
    accuracy, config = report["exact_match"], report["config"]
    return _CARD.format(
        name=NAME,
        **config,
        parameters=report["parameters"],
        megabytes=report["weights_bytes"] / 1e6,
        longest_row=training["longest_row"],
        mean_row=round(training["mean_row"]),
        command=training["command"],
        steps=training["steps"],
        step_tokens=settings["tokens"],
        minutes=training["minutes"],
        learning_rate=settings["learning_rate"],
        balance=settings["balance"],
        routing=settings["routing"],
        routing_floor=settings["routing_floor"],
        repeats=(
            "seeded, so another run draws the same batches"
            if "--minutes" not in training["command"]
            else "seeded, but the learning rate follows the clock where that is ahead of the steps"
        ),
        provenance=f"\n\n{training['provenance']}" if "provenance" in training else "",
        unseen_seed=unseen["seed"],
        samples=report["samples_per_task"],
        seed=report["seed"],
        widened_samples=wide["samples_per_task"],
        accuracy=_table(
            ("task", "what", "exact match", "unseen", f"widened ({wide['weights_bytes'] / 1e9:.2f} GB)"),
            [
                (
                    task,
                    _TASKS_ARE[task],
                    f"{accuracy[task]['exact']:.3f}",
                    f"{unseen['exact_match'][task]:.3f}",
                    f"{wide['exact_match'][task]['exact']:.3f}",
                )
                for task in accuracy
            ],
        ),
        kinds="; ".join(
            f"{task}: " + ", ".join(f"{kind} {share:.2f}" for kind, share in figures["by_kind"].items())
            for task, figures in accuracy.items()
        ),
        routing_mean=routing["mean"],
        routing_prompt=fmean(routing["by_phase"]["prompt"].values()),
        routing_answer=fmean(routing["by_phase"]["answer"].values()),
        routing_noise=routing["same_task_halves"],
        routing_pairs=_table(
            ("pair of tasks", "all tokens", "prompts", "answers"),
            [
                (pair, f"{bits:.3f}", *(f"{routing['by_phase'][name][pair]:.3f}" for name in _PARTS))
                for pair, bits in routing["by_pair"].items()
            ],
        ),
        routing_layers=_table(
            ("layer", "bits, mean of the pairs", "busiest expert", "idlest expert"),
            [
                (str(layer), f"{bits:.3f}", f"{most:.1%} of picks", f"{least:.1%}")
                for layer, (bits, most, least) in enumerate(
                    zip(
                        routing["by_layer"],
                        routing["busiest_expert_by_layer"],
                        routing["idlest_expert_by_layer"],
                        strict=True,
                    )
                )
            ],
        ),
        lengths=_table(
            ("task", "prompt", "answer"),
            [
                (task, *(" / ".join(f"{parts[name][k]:.0f}" for k in ("least", "mean", "most")) for name in _PARTS))
                for task, parts in report["lengths"].items()
            ],
        ),
    )


_PARTS: Final = ("prompt", "answer")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
