"""The measures behind the model card, and the card itself."""

from __future__ import annotations

import json

import numpy as np
import pytest

from greenroom.demo import bundled_model_path
from greenroom.demo.evaluate.card import render_card
from greenroom.demo.evaluate.evaluation import divergence


def test_divergence_is_jensen_shannon_in_bits() -> None:
    p, q = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.5, 0.5])
    assert divergence(p, q) == pytest.approx(1.0)
    assert divergence(p, p) == 0.0
    half = np.array([0.5, 0.5, 0.0])
    # by hand: H((3/4, 1/4, 0)) − (H(p) + H(half)) / 2 = 0.8113 − 0.5
    assert divergence(p, half) == pytest.approx(0.31128, abs=1e-5)
    assert divergence(np.stack([p, p]), np.stack([q, half])).shape == (2,)


def test_the_card_is_what_the_measurement_says() -> None:
    report = json.loads((bundled_model_path() / "evaluation.json").read_text(encoding="utf-8"))
    assert (bundled_model_path() / "README.md").read_text(encoding="utf-8") == render_card(report)
    assert sum(report["exact_match"][task]["exact"] >= 0.9 for task in report["exact_match"]) >= 4
    assert min(figures["exact"] for figures in report["exact_match"].values()) >= 0.7
