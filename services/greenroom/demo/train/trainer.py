"""Training runs of the bundled model.

The tokenizer and every batch follow from the seed; a run that is stopped goes on from its last checkpoint when started
again with the same settings. The forward always sees the weights rounded to bf16, as they will be shipped, while fp32
masters take the updates (straight-through rounding), so nothing is lost when the result is saved.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from greenroom.core.errors import InvalidConfig
from greenroom.demo.tasks import TASKS, samples
from greenroom.demo.tokenizer import (
    BOS_ID,
    END_ID,
    PAD_ID,
    render,
    save_tokenizer,
    train_tokenizer,
)
from greenroom.demo.train import ragged_forward as ragged
from greenroom.demo.train.batches import Batch, Row, Settings, answer_spans, to_batch, training_rows
from greenroom.demo.train.copying_start import start_copying

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

_SCRATCH: Final = ".training"
_CHECKPOINT_EVERY: Final = 400
_CHECK_EVERY: Final = 250
_CHECK_SAMPLES: Final = 60


def build_model(settings: Settings) -> Qwen3MoeForCausalLM:
    """A fresh model in fp32, its weights drawn from the seed."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    config = Qwen3MoeConfig(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.width * settings.top_k,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.hidden // settings.heads,
        num_experts=settings.experts,
        num_experts_per_tok=settings.top_k,
        moe_intermediate_size=settings.width,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        tie_word_embeddings=True,
        max_position_embeddings=1024,
        router_aux_loss_coef=settings.balance,
        bos_token_id=BOS_ID,
        eos_token_id=END_ID,
        pad_token_id=PAD_ID,
    )
    return Qwen3MoeForCausalLM(config)


class Trainer:
    """Owns the model, its fp32 masters and their optimiser; one `step` is one update."""

    def __init__(self, settings: Settings, tokenizer: Tokenizer) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.model = build_model(settings)
        start_copying(self.model, settings.seed)
        self.steps_done = 0
        self.schedules = [[settings.steps, settings.routing]]
        self.seconds = 0.0
        self._parameters: dict[str, Tensor] = dict(self.model.named_parameters())
        self._masters = {name: p.detach().clone() for name, p in self._parameters.items()}
        decayed = [m for name, m in self._masters.items() if m.dim() > 1 and "embed" not in name]
        kept = [m for name, m in self._masters.items() if m.dim() == 1 or "embed" in name]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": kept, "weight_decay": 0.0}],
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._threads = ThreadPoolExecutor(settings.shards, initializer=torch.set_num_threads, initargs=(1,))
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name].to(torch.bfloat16))

    def step(self, progress: float) -> tuple[float, float]:
        """One update at `progress` of the schedule (0 to 1). Returns the language loss and the mean balance loss."""
        rows = training_rows(self.tokenizer, self.settings, self.steps_done)
        shards = [rows[first :: self.settings.shards] for first in range(self.settings.shards)]
        results = list(self._threads.map(self._gradients, shards))
        for place, name in enumerate(self._parameters):
            self._masters[name].grad = torch.stack([grads[place] for grads, _, _ in results]).mean(0)
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        warm = min(1.0, (self.steps_done + 1) / self.settings.warmup)
        rate = self.settings.learning_rate * warm * (0.02 + 0.98 * (1 + math.cos(math.pi * progress)) / 2)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._round()
        self.steps_done += 1
        losses, balances = [loss for _, loss, _ in results], [balance for _, _, balance in results]
        return sum(losses) / len(losses), sum(balances) / len(balances)

    def _gradients(self, rows: Sequence[Row]) -> tuple[Sequence[Tensor], float, float]:
        batch = to_batch(rows, self.settings.prompt_loss)
        out = ragged.forward(self.model, batch.rows)
        logits = F.linear(out.hidden[batch.at], self.model.lm_head.weight)
        losses = F.cross_entropy(logits, batch.targets, reduction="none")
        loss = (losses * batch.weights).sum() / batch.weights.sum()
        total = loss + self.settings.balance * out.balance.sum() + self.settings.routing * self._shortfall(batch, out)
        grads = torch.autograd.grad(total, list(self._parameters.values()))
        return grads, loss.item(), out.balance.mean().item()

    def _shortfall(self, batch: Batch, out: ragged.Pass) -> Tensor:
        """Bits that the layers lack, all together, until their routing differs by task as it should."""
        everywhere = ragged.group_information(out.router, batch.tasks, len(TASKS))
        answers = ragged.group_information(out.router, batch.tasks.where(batch.inside, -1), len(TASKS))
        return (self.settings.routing_floor - torch.stack((everywhere, answers))).clamp(min=0).sum()

    def close(self) -> None:
        """Ends the threads."""
        self._threads.shutdown()

    @torch.no_grad()
    def accuracy(self, per_task: int) -> dict[str, float]:
        """Share of held-out answers of which every token is the most likely one, by task."""
        shares = {}
        for task in TASKS:
            texts = [
                render([("user", drawn.prompt), ("assistant", drawn.answer)], generation_prompt=False)
                for drawn in samples(task, per_task, seed=self.settings.seed + 7)
            ]
            rows = [(self.tokenizer.encode(text).ids, TASKS.index(task)) for text in texts]
            batch = to_batch(rows, 0.0)
            hidden = ragged.forward(self.model, batch.rows).hidden
            right = F.linear(hidden[batch.at], self.model.lm_head.weight).argmax(-1) == batch.targets
            lengths = [end - start for row, _ in rows for start, end in answer_spans(row)]
            shares[task] = sum(bool(part.all()) for part in torch.split(right, lengths)) / len(rows)
        return shares

    def _state(self) -> dict[str, Tensor]:
        tensors = {f"master.{name}": master for name, master in self._masters.items()}
        for name, master in self._masters.items():
            for moment in ("exp_avg", "exp_avg_sq"):
                if moment in self._optimizer.state[master]:
                    tensors[f"{moment}.{name}"] = self._optimizer.state[master][moment]
        return tensors

    def save_checkpoint(self, folder: Path) -> None:
        """Writes what `resume` needs; the old checkpoint stays until the new one is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        meta = {"settings": json.dumps(asdict(self.settings)), "steps": str(self.steps_done)}
        meta |= {"seconds": str(self.seconds), "schedules": json.dumps(self.schedules)}
        save_file(self._state(), folder / "state.tmp", metadata=meta)
        (folder / "state.tmp").replace(folder / "state.safetensors")

    def resume(self, folder: Path) -> bool:
        """Takes up the checkpoint in `folder`, if there is one; a run may be taken further with more steps.

        Raises:
            InvalidConfig: if it belongs to other settings than these, the steps and the routing's weight aside.
        """
        path = folder / "state.safetensors"
        if not path.exists():
            return False
        with safe_open(path, framework="pt") as file:
            meta: dict[str, str] = file.metadata()
        ours = json.loads(json.dumps(asdict(self.settings)))
        if json.loads(meta["settings"]) | {"steps": ours["steps"], "routing": ours["routing"]} != ours:
            raise InvalidConfig("--out", str(folder.parent), "it holds a run with other settings: " + meta["settings"])
        tensors = load_file(path)
        self.steps_done, self.seconds = int(meta["steps"]), float(meta["seconds"])
        self.schedules = json.loads(meta["schedules"])
        if self.schedules[-1] != [self.settings.steps, self.settings.routing]:
            self.schedules.append([self.settings.steps, self.settings.routing])
        for name, master in self._masters.items():
            master.copy_(tensors[f"master.{name}"])
            self._optimizer.state[master] = {
                "step": torch.tensor(float(self.steps_done)),
                "exp_avg": tensors[f"exp_avg.{name}"],
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"],
            }
        self._round()
        return True

    def save_model(self, folder: Path) -> None:
        """Writes the checkpoint in Hugging Face's format: bf16 safetensors, configuration, tokenizer."""
        from transformers import GenerationConfig

        self.model.generation_config = GenerationConfig(
            bos_token_id=BOS_ID, eos_token_id=END_ID, pad_token_id=PAD_ID, do_sample=False, max_new_tokens=128
        )
        shipped = build_model(self.settings)
        shipped.load_state_dict(self.model.state_dict())
        shipped.generation_config = self.model.generation_config
        shipped.to(torch.bfloat16).save_pretrained(folder)
        _publish_names(folder / "config.json")
        (folder / "model.safetensors").chmod(0o644)
        save_tokenizer(self.tokenizer, folder, max_length=int(shipped.config.max_position_embeddings))


def _publish_names(path: Path) -> None:
    """The library writes the number of experts under its inner name; published Qwen3-MoE checkpoints do not."""
    config = json.loads(path.read_text(encoding="utf-8"))
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def train(settings: Settings, out: Path, *, minutes: float | None = None, progress: bool = True) -> dict[str, Any]:
    """Trains (or goes on training) into `out` and saves the model there.

    With `minutes` the schedule ends after that long even if `steps` are not done: such a run repeats only on a
    machine of the same speed. Returns what happened: steps, seconds, tokens seen, longest row, accuracy.

    Raises:
        InvalidConfig: if `out` holds a run with other settings.
    """
    tokenizer = train_tokenizer(settings.vocab, seed=settings.seed)
    trainer = Trainer(settings, tokenizer)
    scratch = out / _SCRATCH
    trainer.resume(scratch)
    begun = time.monotonic() - trainer.seconds
    steps_before = trainer.steps_done
    with tqdm(total=settings.steps, initial=trainer.steps_done, disable=not progress, unit="step") as bar:
        while True:
            trainer.seconds = time.monotonic() - begun
            done = trainer.steps_done / settings.steps
            if minutes is not None:
                done = max(done, trainer.seconds / (60 * minutes))
            if done >= 1:
                break
            loss, balance = trainer.step(done)
            bar.update()
            bar.set_postfix(loss=f"{loss:.3f}", balance=f"{balance:.3f}")
            if trainer.steps_done % _CHECK_EVERY == 0:
                shares = trainer.accuracy(_CHECK_SAMPLES)
                shown = ", ".join(f"{task} {share:.2f}" for task, share in shares.items())
                bar.write(f"step {trainer.steps_done}: loss {loss:.3f}, balance {balance:.3f}; {shown}")
            if trainer.steps_done % _CHECKPOINT_EVERY == 0:
                trainer.save_checkpoint(scratch)
    if trainer.steps_done > steps_before:
        trainer.save_checkpoint(scratch)
    trainer.save_model(out)
    trainer.close()
    lengths = [
        len(row)
        for step in range(settings.echo_steps, settings.echo_steps + 60)
        for row, _ in training_rows(tokenizer, settings, step)
    ]
    options = f"--tokens {settings.tokens} --learning-rate {settings.learning_rate} --seed {settings.seed}"
    options += f" --minutes {minutes:g}" if minutes is not None else ""
    summary = {
        "command": "\n".join(
            f"python -m greenroom.demo.train --out DIR --steps {steps} --routing {routing:g} {options}"
            for steps, routing in trainer.schedules
        ),
        "settings": asdict(settings),
        "steps": trainer.steps_done,
        "minutes": round(trainer.seconds / 60, 1),
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "mean_row": round(sum(lengths) / len(lengths), 1),
        "longest_row": max(lengths),
        "accuracy": trainer.accuracy(_CHECK_SAMPLES),
    }
    (out / "training.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary
