"""Measures the bundled model with plain transformers: `python -m greenroom.demo.evaluate MODEL --out FILE`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from greenroom.demo.evaluate.card import write_card
from greenroom.demo.evaluate.evaluation import CARD_SEED, UNSEEN_SEED, Evaluation, exact_match, lengths, routing

_SHOWN: Final = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="The JSON to write.")
@click.option("--card", type=click.Path(dir_okay=False, path_type=Path), help="The model card to write from it.")
@click.option("--samples", "per_task", default=400, show_default=True, type=click.IntRange(2))
@click.option("--training", type=click.Path(exists=True, path_type=Path), help="training.json of the training run.")
@click.option("--widened", type=click.Path(exists=True, path_type=Path), help="A widened copy to measure too.")
@click.option("--widened-samples", default=50, show_default=True, type=click.IntRange(1))
def main(
    model: Path,
    out: Path,
    card: Path | None,
    per_task: int,
    training: Path | None,
    widened: Path | None,
    widened_samples: int,
) -> None:
    """Measure a trained checkpoint on held-out samples; what is not measured this time is kept from --out."""
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if training is not None:
        report["training"] = json.loads(training.read_text(encoding="utf-8"))
    evaluation = Evaluation(model)
    report |= {
        "seed": CARD_SEED,
        "samples_per_task": per_task,
        "weights_bytes": sum(file.stat().st_size for file in model.glob("*.safetensors")),
        "parameters": sum(p.numel() for p in evaluation.model.parameters()),
        "config": {name: getattr(evaluation.model.config, name) for name in _SHOWN},
        "exact_match": exact_match(evaluation, per_task),
        "unseen": {
            "seed": UNSEEN_SEED,
            "exact_match": {
                task: figures["exact"] for task, figures in exact_match(evaluation, per_task, seed=UNSEEN_SEED).items()
            },
        },
        "lengths": lengths(evaluation, per_task),
        "routing": routing(evaluation, per_task),
    }
    if widened is not None:
        wide = Evaluation(widened)
        report["widened"] = {
            "samples_per_task": widened_samples,
            "weights_bytes": sum(file.stat().st_size for file in widened.glob("*.safetensors")),
            "width": wide.model.config.moe_intermediate_size,
            "exact_match": exact_match(wide, widened_samples),
        }
    out.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if card is not None:
        write_card(report, card)
    for task, figures in report["exact_match"].items():
        click.echo(f"{task}: {figures['exact']:.3f}")


if __name__ == "__main__":
    main()
