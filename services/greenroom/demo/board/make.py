"""A folder with a board's experts, its definition file, samples to send, and a picture: `greenroom coe demo`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from greenroom.core.files import check_new_folder, whole_folder
from greenroom.demo.board import DEFINITION_NAME, bundled_board_path
from greenroom.demo.board.card import Judged, Report, card
from greenroom.demo.board.component_types import TYPES, ComponentType
from greenroom.demo.board.crops import PIXELS
from greenroom.demo.board.definition import FOLDER, definition_text
from greenroom.demo.board.drawing_tasks import DrawEach, drawn, one_by_one
from greenroom.demo.board.encode import check_encoder, write_png
from greenroom.demo.board.expert_crops import Expert, Labelled, experts_of
from greenroom.demo.board.picture import board_picture
from greenroom.demo.board.samples import write_samples

if TYPE_CHECKING:
    from transformers import ResNetForImageClassification

    from greenroom.demo.board.training import Settings

SAMPLES: Final = 64
REPORT: Final = "training.json"
PICTURE: Final = "board.png"
CARD: Final = "README.md"
_LABELLED_ALIKE: Final = 40
"""So many crops of a label, of each other expert, say how well an expert does on what is not its own."""

OnProgress = Callable[[str, int, int], object]
"""What is being done, how many steps of it are done, and of how many. Called often."""


def train_board(
    directory: Path,
    types: Sequence[ComponentType],
    settings: Settings,
    on: OnProgress,
    draw_each: DrawEach = one_by_one,
) -> Report:
    """Draws, trains and judges experts for these types. ``directory`` appears whole or not at all.

    ``draw_each``: how the crops are drawn, such as in several processes; that changes none of them.

    Raises InvalidConfig if it is not empty, GreenroomError where Pillow is missing or a file can not be written.
    """
    check_new_folder(directory)
    check_encoder()
    began = time.monotonic()
    with whole_folder(directory) as draft:
        experts = experts_of(types)
        judged = _trained(draft, experts, settings, on, draw_each)
        _write_rest(draft, types, experts, settings.seed, on)
        report = _report(types, settings, judged, time.monotonic() - began)
        (draft / REPORT).write_text(json.dumps(report.as_json(), indent=2) + "\n", encoding="utf-8")
        (draft / CARD).write_text(card(report), encoding="utf-8")
    return report


def copy_board(directory: Path, seed: int, on: OnProgress) -> Report:
    """The bundled experts instead of new ones, with samples and a picture of this seed. Raises as ``train_board``."""
    check_new_folder(directory)
    check_encoder()
    bundled = bundled_board_path().parent
    with whole_folder(directory) as draft:
        shutil.copytree(bundled / FOLDER, draft / FOLDER)
        for name in (REPORT, CARD):
            shutil.copyfile(bundled / name, draft / name)
        _write_rest(draft, TYPES, experts_of(), seed, on)
    return bundled_report()


def bundled_report() -> Report:
    """How the bundled experts were made, and how they did."""
    return Report.from_json(json.loads((bundled_board_path().parent / REPORT).read_text(encoding="utf-8")))


def _write_rest(
    draft: Path, types: Sequence[ComponentType], experts: Sequence[Expert], seed: int, on: OnProgress
) -> None:
    on("samples", 0, SAMPLES)
    (draft / DEFINITION_NAME).write_text(definition_text(types, experts), encoding="utf-8")
    write_samples(draft, types, SAMPLES, seed)
    write_png(draft / PICTURE, board_picture(types, seed))
    on("samples", SAMPLES, SAMPLES)


def _trained(
    draft: Path, experts: Sequence[Expert], settings: Settings, on: OnProgress, draw_each: DrawEach
) -> list[Judged]:
    from greenroom.demo.board.training import save_expert, train_expert, train_start

    step = _counting("drawing", 2 * sum(len(expert.labels) for expert in experts), on)
    data = drawn(experts, settings.crops, settings.seed, "train", draw_each, step)
    heldout = drawn(experts, settings.heldout, settings.seed, "heldout", draw_each, step)
    start = train_start(experts, data, settings, _counting("common start", settings.start_steps, on))
    step = _counting("experts", settings.expert_steps * len(experts), on)
    judged = []
    for which, expert in enumerate(experts):
        model = train_expert(start, experts, which, data[which], settings, step)
        size = save_expert(model, draft / FOLDER / expert.name)
        judged.append(_judged(model, experts, which, heldout, size))
    return judged


def _judged(
    model: ResNetForImageClassification,
    experts: Sequence[Expert],
    which: int,
    heldout: Sequence[Labelled],
    size: int,
) -> Judged:
    from greenroom.demo.board.training import labels_of

    expert, own = experts[which], heldout[which]
    right: list[bool] = []
    for other, data in zip(experts, heldout, strict=True):
        if other.name == expert.name or other.shared != expert.shared:
            continue
        for place, label in enumerate(other.labels):
            if label in expert.labels:
                crops = data.crops[data.labels == place][:_LABELLED_ALIKE]
                right += (labels_of(model, crops) == expert.labels.index(label)).tolist()
    return Judged(
        expert=expert.name,
        labels=expert.labels,
        types=tuple(one.name for one in expert.types),
        accuracy=float((labels_of(model, own.crops) == own.labels).mean()),
        elsewhere=sum(right) / len(right) if right else None,
        bytes=size,
        parameters=sum(one.numel() for one in model.parameters()),
    )


def _report(types: Sequence[ComponentType], settings: Settings, judged: Sequence[Judged], seconds: float) -> Report:
    import torch
    import transformers

    options = "" if settings.seed == 0 else f" --seed {settings.seed}"
    if len(types) < len(TYPES):
        options += f" --types {len(types)}"
    if settings == settings.quick:
        options += " --quick"
    return Report(
        settings=asdict(settings),
        options=options,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        seconds=round(seconds, 1),
        pixels=PIXELS,
        edges=sum(one.orientation is not None for one in types),
        experts=tuple(judged),
    )


def _counting(what: str, of: int, on: OnProgress) -> Callable[[], object]:
    """Tells ``on`` of each step, and at once that the first has begun."""
    on(what, 0, of)
    done = iter(range(1, of + 1))
    return lambda: on(what, next(done), of)
