"""Random experts, as large as the paper's board wants them. They know nothing.

Experts of a role differ in their last layer, so that to make one takes as long as to write it. Each has a file of its
own, because `from_pretrained` is to find none of it in the page cache on account of another one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import xxhash

if TYPE_CHECKING:
    import torch

CROP_PIXELS: Final = 64
LABELS: Final = ("good", "broken")
_LAST: Final = "classifier.1.weight"


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a random ResNet that stands for a model of the paper."""

    widths: tuple[int, ...]
    depths: tuple[int, ...] = (2, 2, 2, 2)
    layer_type: str = "basic"
    stem: int = 64


SHAPES: Final = {
    "type": Shape((64, 128, 256, 512)),
    "half": Shape((44, 90, 180, 362), stem=44),
    "equal": Shape((60, 134, 250, 516), stem=60),
    "resnet-101": Shape((256, 512, 1024, 2048), (3, 4, 23, 3), "bottleneck"),
}
"""A type's own expert, ResNet-18; detectors of half and of equal size; the paper's classifier."""


def weight_bytes(role: str) -> int:
    """Of one expert's weights."""
    return sum(tensor.nbytes for tensor in _weights(role).values())


def save_expert(folder: Path, role: str) -> None:
    """The checkpoint of an expert that is called as its folder. It appears whole or not at all."""
    import torch
    from safetensors.torch import save_file
    from transformers import ViTImageProcessorPil

    name = folder.name
    draft = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder.parent))
    try:
        weights = dict(_weights(role))
        own = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        weights[_LAST] = torch.randn(weights[_LAST].shape, generator=own) / weights[_LAST].shape[-1] ** 0.5
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        labels = [f"{name}: {label}" for label in LABELS]
        config = _config(role) | {
            "id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}
        }  # fmt: skip
        (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        ViTImageProcessorPil(size={"height": CROP_PIXELS, "width": CROP_PIXELS}).save_pretrained(draft)
        draft.chmod(0o755)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _settings(shape: Shape) -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        hidden_sizes=list(shape.widths), depths=list(shape.depths), layer_type=shape.layer_type,
        embedding_size=shape.stem, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip


@cache
def _weights(role: str) -> dict[str, torch.Tensor]:
    import torch
    from transformers import ResNetForImageClassification

    with torch.random.fork_rng():
        torch.manual_seed(xxhash.xxh3_64_intdigest(role.encode()) >> 1)
        model = ResNetForImageClassification(_settings(SHAPES[role]))
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


@cache
def _config(role: str) -> dict[str, Any]:
    settings = _settings(SHAPES[role])
    settings.architectures = ["ResNetForImageClassification"]
    settings.dtype = "float32"
    told: dict[str, Any] = json.loads(settings.to_json_string(use_diff=False))
    return told
