"""From a model's outputs to results. An output that is no number fails its own request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from greenroom.coe.computing.expert_result import Box, ExpertResult
from greenroom.coe.loading.pooling import Pooling
from greenroom.core.errors import ExpertFailed

LEAST_BOX_SCORE: Final = 0.5
"""A box below it is none, as in transformers' own post-processing."""

Outcome = ExpertResult | ExpertFailed
Boxes = Callable[[Any, Sequence[tuple[int, int]], float], list[Any]]


def classifications(
    logits: torch.Tensor, labels: Sequence[str], problem_type: str | None, expert: str
) -> list[Outcome]:
    """``logits[B, L]``. Scores are shares, or of several labels at once, or of one, each one's own probability.

    As transformers' pipelines decide it. A regression's score is its value.
    """
    wide = logits.detach().float().cpu()
    if problem_type == "regression":
        scores = wide
    elif problem_type == "multi_label_classification" or wide.shape[1] == 1:
        scores = wide.sigmoid()
    else:
        scores = wide.softmax(dim=-1)
    outcomes: list[Outcome] = []
    for row, usable in zip(scores.tolist(), wide.isfinite().all(dim=-1).tolist(), strict=True):
        if not usable:
            outcomes.append(_failed(expert))
            continue
        best = max(range(len(row)), key=row.__getitem__)
        outcomes.append(ExpertResult(labels[best], row[best], _by_label(zip(labels, row, strict=True))))
    return outcomes


def detections(
    outputs: Any, labels: Sequence[str], sizes: Sequence[tuple[int, int]], boxes: Boxes, expert: str
) -> list[Outcome]:
    """``outputs``: with ``logits[B, Q, L + 1]`` and ``pred_boxes[B, Q, 4]``. ``sizes[B]``: height and width.

    ``boxes``: the checkpoint's own post-processing.
    """
    usable = (
        outputs.logits.isfinite().flatten(1).all(dim=1) & outputs.pred_boxes.isfinite().flatten(1).all(dim=1)
    ).tolist()
    outputs.logits, outputs.pred_boxes = outputs.logits.float().cpu(), outputs.pred_boxes.float().cpu()
    outcomes: list[Outcome] = []
    for good, found in zip(usable, boxes(outputs, sizes, LEAST_BOX_SCORE), strict=True):
        outcomes.append(_detection(found, labels) if good else _failed(expert))
    return outcomes


def embeddings(outputs: Any, mask: torch.Tensor | None, pooling: Pooling, expert: str) -> list[Outcome]:
    """Of texts (``mask[B, T]``: which tokens are no padding) by ``pooling`` over ``last_hidden_state[B, T, E]``.

    Of images (no mask) ``pooler_output``, or without one the mean over all but the batch and the last dimension.
    """
    pooled = getattr(outputs, "pooler_output", None)
    if mask is None:
        hidden = outputs.last_hidden_state.float()
        vectors = pooled.float().flatten(1) if pooled is not None else hidden.flatten(1, -2).mean(dim=1)
    elif pooling.first_token:
        vectors = outputs.last_hidden_state[:, 0].float()
    else:
        weights = mask.unsqueeze(-1).float()
        vectors = (outputs.last_hidden_state.float() * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1)
    if pooling.normalised:
        vectors = torch.nn.functional.normalize(vectors, dim=-1)
    rows = vectors.detach().cpu()
    usable = rows.isfinite().all(dim=-1).tolist()
    # a copy each: a row would keep the whole batch in memory
    return [
        ExpertResult(embedding=row.numpy().copy()) if good else _failed(expert)
        for row, good in zip(rows, usable, strict=True)
    ]


def _detection(found: Any, labels: Sequence[str]) -> ExpertResult:
    rows = zip(found["scores"].tolist(), found["labels"].tolist(), found["boxes"].tolist(), strict=True)
    boxes = tuple(
        Box(labels[label], score, *corners) for score, label, corners in sorted(rows, key=lambda row: -row[0])
    )
    if not boxes:
        return ExpertResult()
    return ExpertResult(boxes[0].label, boxes[0].score, _by_label((box.label, box.score) for box in boxes), boxes)


def _by_label(scores: Any) -> dict[str, float]:
    """The best score of each label: several classes may have one name."""
    found: dict[str, float] = {}
    for label, score in scores:
        found[label] = max(score, found.get(label, score))
    return found


def _failed(expert: str) -> ExpertFailed:
    return ExpertFailed(
        f"expert {expert!r} gave what is no finite number for this input; if it does so for every input its "
        "checkpoint is broken"
    )
