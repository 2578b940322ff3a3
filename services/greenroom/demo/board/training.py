"""The experts' models: a small ResNet of transformers, trained for all experts at once and then for each alone.

Every expert starts from what one body has learnt of all types. On one machine with one number of threads the same seed
gives the same weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from greenroom.demo.board.crops import PIXELS
from greenroom.demo.board.expert_crops import Expert, Labelled

if TYPE_CHECKING:
    from transformers import ResNetForImageClassification

_MEAN: Final = 0.5
_DEVIATION: Final = 0.25
_EVALUATED_AT_ONCE: Final = 256


@dataclass(frozen=True, slots=True)
class Settings:
    """``crops``: drawn of each label to learn from; ``heldout``: and to be judged by. Steps are of ``batch`` crops."""

    seed: int = 0
    crops: int = 400
    heldout: int = 100
    start_steps: int = 1000
    expert_steps: int = 300
    batch: int = 96
    start_rate: float = 4e-3
    expert_rate: float = 1.5e-3
    hidden_sizes: tuple[int, ...] = (16, 24, 40, 64)

    @property
    def quick(self) -> Settings:
        """Fewer of all: to see that it runs. The experts are worth little."""
        return replace(self, crops=24, heldout=20, start_steps=40, expert_steps=15, batch=48)


OnStep = Callable[[], object]


def new_model(labels: Sequence[str], settings: Settings) -> ResNetForImageClassification:
    """In fp32, with random weights."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=settings.hidden_sizes[0],
        hidden_sizes=list(settings.hidden_sizes),
        depths=[1] * len(settings.hidden_sizes),
        layer_type="basic",
        id2label=dict(enumerate(labels)),
        label2id={label: place for place, label in enumerate(labels)},
    )
    return ResNetForImageClassification(config)


def pixels_of(crops: NDArray[np.uint8]) -> Tensor:
    """``[N, 3, height, width]`` fp32, as the checkpoint's own image processor makes it of crops of 64 pixels."""
    return (torch.from_numpy(crops).permute(0, 3, 1, 2).to(torch.float32) / 255 - _MEAN) / _DEVIATION


def train_start(
    experts: Sequence[Expert], data: Sequence[Labelled], settings: Settings, on_step: OnStep
) -> ResNetForImageClassification:
    """One body for all, with the labels of all experts side by side; of each crop only its own expert's count."""
    torch.manual_seed(settings.seed)
    names = [f"{expert.name}/{label}" for expert in experts for label in expert.labels]
    model = new_model(names, settings)
    firsts = _firsts(experts)
    crops = np.concatenate([one.crops for one in data])
    labels = torch.from_numpy(np.concatenate([one.labels + first for one, first in zip(data, firsts, strict=True)]))
    others = torch.full((len(experts), len(names)), -math.inf)
    for place, (expert, first) in enumerate(zip(experts, firsts, strict=True)):
        others[place, first : first + len(expert.labels)] = 0
    of = torch.repeat_interleave(torch.arange(len(experts)), torch.tensor([len(one.labels) for one in data]))
    flips = torch.tensor([not expert.shared for expert in experts])[of]
    _train(
        model, _Crops(pixels_of(crops), labels, flips), settings.start_steps, settings.start_rate, settings, on_step,
        lambda logits, taken: logits + others[of[taken]],
    )  # fmt: skip
    return model


def train_expert(
    start: ResNetForImageClassification,
    experts: Sequence[Expert],
    which: int,
    data: Labelled,
    settings: Settings,
    on_step: OnStep,
) -> ResNetForImageClassification:
    """The expert ``experts[which]``, taken further from the common start on its own crops."""
    torch.manual_seed(settings.seed * 1000 + which + 1)
    expert, first = experts[which], _firsts(experts)[which]
    model = new_model(expert.labels, settings)
    model.resnet.load_state_dict(start.resnet.state_dict())
    own = slice(first, first + len(expert.labels))
    head, started = model.classifier[1], start.classifier[1]
    with torch.no_grad():
        head.weight.copy_(started.weight[own])
        head.bias.copy_(started.bias[own])
    flips = torch.full((len(data.labels),), not expert.shared)
    crops = _Crops(pixels_of(data.crops), torch.from_numpy(data.labels), flips)
    _train(model, crops, settings.expert_steps, settings.expert_rate, settings, on_step, lambda logits, _: logits)
    return model


@torch.no_grad()
def labels_of(model: ResNetForImageClassification, crops: NDArray[np.uint8]) -> NDArray[np.int64]:
    """``[N]``: the place of the label that the model gives each crop."""
    model.eval()
    parts = [crops[begin : begin + _EVALUATED_AT_ONCE] for begin in range(0, len(crops), _EVALUATED_AT_ONCE)]
    found = [model(pixels_of(part)).logits.argmax(-1).numpy() for part in parts]
    return np.concatenate(found).astype(np.int64) if found else np.zeros(0, np.int64)


def save_expert(model: ResNetForImageClassification, folder: Path) -> int:
    """Writes the checkpoint in transformers' format. Returns the bytes of its weights."""
    from transformers.utils import logging

    model.eval()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would stand between ours, for each expert
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    settings: Mapping[str, object] = {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": [_MEAN] * 3,
        "image_processor_type": "ViTImageProcessor",  # resizes to a square and cuts nothing off; ResNet's own does
        "image_std": [_DEVIATION] * 3,
        "resample": 2,  # bilinear
        "rescale_factor": 1 / 255,
        "size": {"height": PIXELS, "width": PIXELS},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return weights.stat().st_size


@dataclass(frozen=True, slots=True)
class _Crops:
    """``pixels[N, 3, 64, 64]``, ``labels[N]``, ``flips[N]``: whether a mirrored one has the same label."""

    pixels: Tensor
    labels: Tensor
    flips: Tensor


def _train(
    model: ResNetForImageClassification,
    crops: _Crops,
    steps: int,
    rate: float,
    settings: Settings,
    on_step: OnStep,
    chosen: Callable[[Tensor, Tensor], Tensor],
) -> None:
    """``chosen``: makes of the logits, and of which crops they are, those that count."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps + 1, pct_start=0.2)
    for taken in _batches(len(crops.labels), steps, settings.batch):
        pixels = _varied(crops.pixels[taken], crops.flips[taken])
        logits = chosen(model(pixels).logits, taken)
        loss = F.cross_entropy(logits, crops.labels[taken])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        on_step()


def _batches(many: int, steps: int, batch: int) -> list[Tensor]:
    """So many batches of places, each place as often as any other but for one."""
    batch = min(batch, many)
    rounds = -(-steps * batch // many)
    order = torch.cat([torch.randperm(many) for _ in range(rounds)])
    return list(torch.split(order[: steps * batch], batch))


def _varied(pixels: Tensor, flips: Tensor) -> Tensor:
    """Moved by up to two pixels, mirrored where that changes no label, brighter or darker."""
    many = len(pixels)
    right, down = (int(one) for one in torch.randint(-2, 3, (2,)))
    found = F.pad(pixels, (2, 2, 2, 2), mode="replicate")[..., 2 + down : 66 + down, 2 + right : 66 + right]
    for axis in (2, 3):
        mirrored = (torch.rand(many) < 0.5) & flips
        found = torch.where(mirrored[:, None, None, None], found.flip(axis), found)
    return found * (1 + 0.1 * torch.randn(many, 1, 1, 1)) + 0.1 * torch.randn(many, 1, 1, 1)


def _firsts(experts: Sequence[Expert]) -> list[int]:
    """The place of each expert's first label, where all their labels lie side by side."""
    sizes = [len(expert.labels) for expert in experts]
    return [sum(sizes[:place]) for place in range(len(sizes))]
