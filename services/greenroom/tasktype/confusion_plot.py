"""Which task types are taken for which, as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from greenroom.core.pictures import check_plot, new_figure, save_figure
from greenroom.tasktype.evaluate import Evaluation
from greenroom.tasktype.extractor import UNKNOWN


def draw_confusion(
    evaluation: Evaluation, path: Path, *, title: str = "Task types of prompts that were held out"
) -> None:
    """Writes a PNG, SVG or PDF: a row for each label, of which each cell is the share that got that answer.

    Raises PlotUnavailable without matplotlib, for another kind of file, or where it can not be written.
    """
    check_plot(path)
    labels = sorted({label for label, _ in evaluation.confusion})
    answers = sorted({answer for _, answer in evaluation.confusion} | set(labels) - {UNKNOWN})
    answers = [answer for answer in answers if answer != UNKNOWN] + [UNKNOWN]
    counts = np.array([[evaluation.confusion[label, answer] for answer in answers] for label in labels])
    counts = counts.reshape(len(labels), len(answers))
    shares = 100 * counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    figure = new_figure(2.6 + 0.85 * len(answers), 1.9 + 0.6 * len(labels))
    axes = figure.subplots()
    image = axes.imshow(shares, cmap="Blues", vmin=0, vmax=100, aspect="auto")
    for row, column in np.ndindex(*shares.shape):
        if counts[row, column]:
            axes.text(
                column,
                row,
                f"{shares[row, column]:.0f} %",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if shares[row, column] > 55 else "black",
            )
    axes.set_xticks(range(len(answers)), answers, rotation=30, ha="right", rotation_mode="anchor")
    axes.set_yticks(
        range(len(labels)), [f"{label} ({total:,})" for label, total in zip(labels, counts.sum(axis=1), strict=True)]
    )
    axes.set_xlabel("answer")
    axes.set_ylabel("label (prompts)")
    axes.set_title(
        f"{title}: {100 * evaluation.accuracy:.1f} % of {evaluation.prompts:,} right,\n"
        f"{100 * evaluation.unknown:.1f} % unknown",
        fontsize=11,
        loc="left",
    )
    figure.colorbar(image, label="share of the label, %")
    save_figure(figure, path)
