from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.coe.computing.expert_result import ExpertResult
from greenroom.coe.computing.outputs import classifications, detections, embeddings
from greenroom.coe.loading.pooling import Pooling
from greenroom.core.errors import ExpertFailed

LABELS = ("a", "b", "c")
LOGITS = torch.tensor([[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]])


def test_a_class_is_the_likeliest() -> None:
    first, second = classifications(LOGITS, LABELS, None, "x")
    assert isinstance(first, ExpertResult)
    assert isinstance(second, ExpertResult)
    assert (first.label, second.label) == ("c", "a")
    assert sum(first.scores.values()) == pytest.approx(1)
    assert first.score == first.scores["c"] == pytest.approx(math.exp(2) / (1 + math.exp(1) + math.exp(2)))


def test_several_labels_at_once_have_their_own_probabilities() -> None:
    (first, _) = classifications(LOGITS, LABELS, "multi_label_classification", "x")
    assert isinstance(first, ExpertResult)
    assert first.scores == pytest.approx({"a": 0.5, "b": 1 / (1 + math.exp(-1)), "c": 1 / (1 + math.exp(-2))})


def test_one_label_has_its_own_probability_and_a_regression_its_value() -> None:
    (first, *_) = classifications(LOGITS[:, 2:], ("yes",), None, "x")
    assert isinstance(first, ExpertResult)
    assert first.score == pytest.approx(1 / (1 + math.exp(-2)))
    (first, *_) = classifications(LOGITS[:, 2:], ("height",), "regression", "x")
    assert isinstance(first, ExpertResult)
    assert first.score == 2.0


def test_classes_of_one_name_have_their_best_score() -> None:
    (first, _) = classifications(LOGITS, ("a", "N/A", "N/A"), None, "x")
    assert isinstance(first, ExpertResult)
    assert first.scores["N/A"] == first.score


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_fails_its_own_request(bad: float) -> None:
    logits = LOGITS.clone()
    logits[0, 1] = bad
    first, second = classifications(logits, LABELS, None, "resistor")
    assert isinstance(first, ExpertFailed)
    assert "'resistor' gave what is no finite number" in str(first)
    assert isinstance(second, ExpertResult)


def boxes_of(outputs: Any, sizes: Any, least: float) -> list[Any]:
    """As transformers' processors do it, with boxes in the place of what they convert."""
    found = []
    for logits, boxes in zip(outputs.logits, outputs.pred_boxes, strict=True):
        scores, labels = logits.softmax(-1)[:, :-1].max(-1)
        kept = scores > least
        found.append({"scores": scores[kept], "labels": labels[kept], "boxes": boxes[kept]})
    return found


def detected(*logits: list[float]) -> Any:
    return SimpleNamespace(logits=torch.tensor([logits]), pred_boxes=torch.rand(1, len(logits), 4))


def test_a_detector_has_the_label_of_its_best_box() -> None:
    outputs = detected([2.0, 0, 0, 0], [0, 4.0, 0, 0], [0, 3.0, 0, 0], [0, 0, 0, 9.0])
    (found,) = detections(outputs, LABELS, [(10, 20)], boxes_of, "x")
    assert isinstance(found, ExpertResult)
    assert [box.label for box in found.boxes] == ["b", "b", "a"]
    assert (found.label, found.score) == ("b", found.boxes[0].score)
    assert found.scores == {"b": found.boxes[0].score, "a": found.boxes[2].score}
    assert found.boxes[0].left == pytest.approx(float(outputs.pred_boxes[0, 1, 0]))


def test_a_detector_that_finds_nothing_has_no_label() -> None:
    (found,) = detections(detected([0.1, 0, 0, 0], [0, 0, 0, 9.0]), LABELS, [(10, 20)], boxes_of, "x")
    assert found == ExpertResult(label=None, score=None, scores={}, boxes=())


def test_boxes_that_are_no_numbers_fail_the_request() -> None:
    outputs = detected([9.0, 0, 0, 0])
    outputs.pred_boxes[0, 0, 0] = float("nan")
    (found,) = detections(outputs, LABELS, [(10, 20)], boxes_of, "x")
    assert isinstance(found, ExpertFailed)


HIDDEN = torch.tensor([[[1.0, 2.0], [3.0, 6.0], [100.0, 100.0]], [[3.0, 4.0], [9.0, 9.0], [9.0, 9.0]]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (Pooling(), [[2.0, 4.0], [3.0, 4.0]]),
        (Pooling(first_token=True), [[1.0, 2.0], [3.0, 4.0]]),
        (Pooling(normalised=True), [[0.4472136, 0.8944272], [0.6, 0.8]]),
    ],
)
def test_embeddings_of_texts(pooling: Pooling, expected: list[list[float]]) -> None:
    found = embeddings(SimpleNamespace(last_hidden_state=HIDDEN), MASK, pooling, "x")
    assert [one.embedding.tolist() for one in found if isinstance(one, ExpertResult) and one.embedding is not None] == [
        pytest.approx(row) for row in expected
    ]


def test_embeddings_of_images() -> None:
    pooled = SimpleNamespace(last_hidden_state=HIDDEN, pooler_output=torch.arange(4.0).view(2, 2, 1, 1))
    (first, _) = embeddings(pooled, None, Pooling(), "x")
    assert isinstance(first, ExpertResult)
    assert first.embedding is not None
    assert np.array_equal(first.embedding, [0, 1])
    assert first.embedding.base is None, "a view would keep the whole batch"
    (_, second) = embeddings(SimpleNamespace(last_hidden_state=HIDDEN), None, Pooling(), "x")
    assert isinstance(second, ExpertResult)
    assert second.embedding is not None
    assert np.array_equal(second.embedding, np.array([7, 22 / 3], dtype=np.float32))


def test_an_embedding_that_is_no_number() -> None:
    hidden = HIDDEN.clone()
    hidden[1, 0, 0] = float("nan")
    first, second = embeddings(SimpleNamespace(last_hidden_state=hidden), MASK, Pooling(), "x")
    assert isinstance(first, ExpertResult)
    assert isinstance(second, ExpertFailed)
