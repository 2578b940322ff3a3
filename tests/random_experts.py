"""Tiny random checkpoints of whole models, saved as real ones are, and a definition of some of them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

WORDS = ["<s>", "<pad>", "</s>", "[UNK]", *"abcdefghijklmnopqrstuvwxyz", "good", "bad", "board", "part", "resistor"]
LABELS = ("good", "worn", "broken")


@dataclass(frozen=True)
class Family:
    """``config``: the arguments of its configuration. ``image``: those of its image processor, None for texts."""

    model_class: str
    config: Callable[[], Any]
    processor: Callable[[], Any] | None = None


def _bert(kind: str, **more: Any) -> Any:
    return getattr(transformers, kind)(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=40, pad_token_id=1, **more,
    )  # fmt: skip


def _resnet(**more: Any) -> Any:
    return transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", **more)


def _convnext_processor() -> Any:
    return transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32}, crop_pct=0.9)


def _detr_processor() -> Any:
    return transformers.DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 48})


def _yolos_processor() -> Any:
    return transformers.YolosImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 48})


FAMILIES: Mapping[str, Family] = {
    "resnet": Family("ResNetForImageClassification", _resnet, _convnext_processor),
    "vit": Family(
        "ViTForImageClassification",
        lambda: transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=32,
            patch_size=8,
        ),
        lambda: transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}),
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        lambda: transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
        _convnext_processor,
    ),
    "mobilenet_v2": Family(
        "MobileNetV2ForImageClassification",
        lambda: transformers.MobileNetV2Config(depth_multiplier=0.35),
        lambda: transformers.MobileNetV2ImageProcessorPil(
            size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32}
        ),
    ),
    "yolos": Family(
        "YolosForObjectDetection",
        lambda: transformers.YolosConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=[32, 48],
            patch_size=8, num_detection_tokens=5,
        ),
        _yolos_processor,
    ),
    "detr": Family(
        "DetrForObjectDetection",
        lambda: transformers.DetrConfig(
            use_timm_backbone=False, backbone=None, backbone_config=_resnet(out_features=["stage2"]), d_model=16,
            encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=4,
        ),
        _detr_processor,
    ),
    "bert": Family("BertForSequenceClassification", lambda: _bert("BertConfig")),
    "distilbert": Family(
        "DistilBertForSequenceClassification",
        lambda: transformers.DistilBertConfig(
            vocab_size=len(WORDS), dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=40,
            pad_token_id=1,
        ),
    ),
    "roberta": Family("RobertaForSequenceClassification", lambda: _bert("RobertaConfig")),
    "bert_embedding": Family("BertModel", lambda: _bert("BertConfig")),
    "resnet_embedding": Family("ResNetModel", _resnet, _convnext_processor),
}  # fmt: skip
DETECTORS = ("yolos", "detr")
EMBEDDINGS = ("bert_embedding", "resnet_embedding")


def takes_images(family: str) -> bool:
    return FAMILIES[family].processor is not None


def save_expert(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    labels: tuple[str, ...] = LABELS,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> Path:
    """A checkpoint with its processor or tokenizer. Every value is random, also those that are 0 or 1 when made."""
    made = FAMILIES[family]
    settings = made.config()
    if family not in EMBEDDINGS:
        settings.id2label = dict(enumerate(labels))
        settings.label2id = {label: number for number, label in enumerate(labels)}
    for name, value in config.items():
        setattr(settings, name, value)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, made.model_class)(settings)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor) * (0.5 if name.endswith("var") else 0.1))
            else:
                tensor.add_(7)
    model.to(dtype).save_pretrained(folder)
    if made.processor is not None:
        made.processor().save_pretrained(folder)
    else:
        small_tokenizer().save_pretrained(folder)
    return folder


def small_tokenizer() -> Any:
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="[UNK]", bos_token="<s>", eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip


def random_image(seed: int = 0, width: int = 50, height: int = 40) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels, "RGB")


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def some_inputs(family: str, count: int) -> list[Any]:
    """Images of several sizes, or texts of several lengths."""
    if takes_images(family):
        return [encoded(random_image(number, 50 + 3 * number, 40)) for number in range(count)]
    return [" ".join(WORDS[4 + number % 9 :][: 3 + 2 * number]) for number in range(count)]


BOARD = """
name = "board"
[router]
parameter = "component"
first = { R1 = "resistor", U1 = "chip" }
[quantities]
R1 = 3
U1 = 1
[experts.resistor]
model = "experts/resistor"
[[experts.resistor.next]]
expert = "turned"
labels = ["good", "worn", "broken"]
probability = 0.5
[experts.chip]
model = "experts/chip"
[[experts.chip.next]]
expert = "turned"
[experts.turned]
model = "experts/turned"
"""


def save_board(folder: Path, families: tuple[str, str, str] = ("resnet", "resnet", "yolos")) -> Path:
    """The definition's file: two experts, and one that follows both."""
    for seed, (name, family) in enumerate(zip(("resistor", "chip", "turned"), families, strict=True)):
        save_expert(family, folder / "experts" / name, seed=seed)
    file = folder / "board.toml"
    file.write_text(BOARD)
    return file
