"""The experts that come with the package: small, loadable by plain transformers, and right as often as is said."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification

from greenroom.coe.graph.definition_file import check_labels, read_definition
from greenroom.demo.board import bundled_board_path
from greenroom.demo.board.card import card
from greenroom.demo.board.component_types import TYPES
from greenroom.demo.board.definition import definition_text
from greenroom.demo.board.expert_crops import Expert, experts_of
from greenroom.demo.board.make import bundled_report
from greenroom.demo.board.training import pixels_of

_EXPERTS = experts_of()
_NAMED = pytest.mark.parametrize("expert", _EXPERTS, ids=[one.name for one in _EXPERTS])
_UNSEEN = 777
"""A seed with which nothing was made, chosen or announced."""
_OF_A_LABEL = 8


def _folder(expert: Expert) -> Path:
    return bundled_board_path().parent / read_definition(bundled_board_path()).experts[expert.name].model


def _crops(expert: Expert) -> tuple[list[np.ndarray], list[str]]:
    drawn = [
        (crop, label) for label in expert.labels for crop in expert.crops_of(label, _OF_A_LABEL, _UNSEEN, "heldout")
    ]
    return [crop for crop, _ in drawn], [label for _, label in drawn]


def _found(expert: Expert, crops: Sequence[np.ndarray]) -> list[str]:
    """What it says of them, by nothing but what transformers knows of the folder."""
    processor = AutoImageProcessor.from_pretrained(_folder(expert))
    model = AutoModelForImageClassification.from_pretrained(_folder(expert))
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    with torch.no_grad():
        logits = model(**processor(list(crops), return_tensors="pt")).logits
    return [model.config.id2label[place] for place in logits.argmax(-1).tolist()]


@_NAMED
def test_it_is_as_accurate_on_fresh_crops_as_announced(expert: Expert) -> None:
    announced = next(one for one in bundled_report().experts if one.expert == expert.name)
    crops, labels = _crops(expert)
    right = sum(a == b for a, b in zip(_found(expert, crops), labels, strict=True))
    assert announced.accuracy > 0.95
    assert right >= len(labels) * announced.accuracy - 2


def test_it_is_asked_about_what_it_was_trained_on() -> None:
    """The image processor of the checkpoint makes of a crop what training made of it."""
    crops, _ = _crops(_EXPERTS[0])
    processor = AutoImageProcessor.from_pretrained(_folder(_EXPERTS[0]))
    pixels = processor(crops[:2], return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(pixels, pixels_of(np.stack(crops[:2])))


def test_the_definition_is_that_of_its_checkpoints() -> None:
    definition = read_definition(bundled_board_path())
    assert bundled_board_path().read_text(encoding="utf-8") == definition_text(TYPES, _EXPERTS)
    configs = {
        name: AutoModelForImageClassification.from_pretrained(bundled_board_path().parent / one.model).config
        for name, one in definition.experts.items()
    }
    check_labels(definition, {name: list(config.id2label.values()) for name, config in configs.items()})
    for expert in _EXPERTS:
        assert tuple(configs[expert.name].id2label.values()) == expert.labels


def test_all_together_are_small() -> None:
    files = [file for file in (bundled_board_path().parent / "experts").rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 10_000_000
    assert {file.suffix for file in files} == {".json", ".safetensors"}


def test_the_card_says_what_was_measured() -> None:
    assert (bundled_board_path().parent / "README.md").read_text(encoding="utf-8") == card(bundled_report())
