"""A folder with a board: what is in it, that the same seed makes the same, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.coe.graph.definition_file import read_definition
from greenroom.coe.graph.expert_graph import ExpertGraph
from greenroom.core.errors import InvalidConfig
from greenroom.demo.board import make
from greenroom.demo.board.component_types import TYPES, ComponentType
from greenroom.demo.board.make import copy_board, train_board
from greenroom.demo.board.samples import samples
from greenroom.demo.board.training import Settings
from tests.plain_picture import plain_picture

_TINY = replace(Settings(seed=3).quick, crops=4, heldout=3, start_steps=2, expert_steps=2, batch=8)
_TWO: tuple[ComponentType, ...] = tuple(one for one in TYPES if one.name in ("fuse", "led"))


def _nothing(what: str, done: int, of: int) -> None:
    assert 0 <= done <= of


@pytest.fixture
def little_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn beside crops takes longer than a tiny training. Tests of their own are of that."""
    monkeypatch.setattr(make, "SAMPLES", 2)
    plain_picture(monkeypatch)


@pytest.mark.usefixtures("little_drawn")
def test_the_same_seed_makes_the_same_experts(tmp_path: Path) -> None:
    made = [train_board(tmp_path / name, _TWO, _TINY, _nothing) for name in ("one", "other")]
    assert made[0].experts == made[1].experts
    assert [one.expert for one in made[0].experts] == ["led", "fuse", "polarity"]
    files = sorted(one.relative_to(tmp_path / "one") for one in (tmp_path / "one").rglob("*") if one.is_file())
    assert files == sorted(
        one.relative_to(tmp_path / "other") for one in (tmp_path / "other").rglob("*") if one.is_file()
    )
    for file in files:
        if file.name not in ("training.json", "README.md"):  # which say how long it took
            assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes(), file
    other = train_board(tmp_path / "seed", _TWO, replace(_TINY, seed=4), _nothing)
    name = "experts/led/model.safetensors"
    assert (tmp_path / "seed" / name).read_bytes() != (tmp_path / "one" / name).read_bytes()
    assert len(other.experts) == 3


@pytest.mark.usefixtures("little_drawn")
def test_training_makes_it_better(tmp_path: Path) -> None:
    settings = replace(_TINY, crops=16, heldout=16, start_steps=30, expert_steps=30, batch=32)
    led = train_board(tmp_path / "board", _TWO[:1], settings, _nothing).experts[0]
    assert led.accuracy > 0.6  # of four labels by chance: 0.25
    assert led.elsewhere is None


def test_samples_say_the_way_that_the_definition_takes(tmp_path: Path) -> None:
    board = tmp_path / "board"
    assert len(copy_board(board, 0, _nothing).experts) == 19
    graph = ExpertGraph(read_definition(board / "board.toml"))
    lines = [json.loads(line) for line in (board / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 64
    for line in lines:
        with PIL.Image.open(board / line["file"]) as picture:
            assert (picture.size, picture.mode, picture.format) == ((64, 64), "RGB", "PNG")
        expert: int | None = graph.first(line["component"])
        for name, label in zip(line["experts"], line["labels"], strict=True):
            assert expert is not None
            assert graph.names[expert] == name
            expert = graph.after(expert, label, 1.0)
        assert expert is None
    assert {len(line["experts"]) for line in lines} == {1, 2}
    assert {line["experts"][0] for line in lines} == {one.name for one in TYPES}
    with PIL.Image.open(board / "board.png") as picture:
        assert picture.size[0] > 500


def test_samples_are_drawn_the_same_again() -> None:
    first, again = (list(samples(TYPES, 20, seed=1)) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert (one.component, one.path, one.labels) == (other.component, other.path, other.labels)
        assert np.array_equal(one.crop, other.crop)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(InvalidConfig, match="not empty"):
        train_board(tmp_path, _TWO, _TINY, _nothing)
    with pytest.raises(InvalidConfig, match="not empty"):
        copy_board(tmp_path, 0, _nothing)
    assert [one.name for one in tmp_path.iterdir()] == ["mine"]


def test_what_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing(what: str, done: int, of: int) -> None:
        if what == "experts" and done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_board(tmp_path / "board", _TWO[:1], _TINY, failing)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("more", [["--quick"], ["--types", "3"]])
def test_bundled_experts_are_taken_whole(tmp_path: Path, more: list[str]) -> None:
    shown = CliRunner().invoke(main, ["coe", "demo", str(tmp_path / "board"), "--bundled", *more])
    assert shown.exit_code == 2
    assert "leave out" in shown.output


@pytest.mark.usefixtures("little_drawn")
def test_the_command_says_what_it_made(tmp_path: Path) -> None:
    board = tmp_path / "board"
    shown = CliRunner().invoke(main, ["coe", "demo", str(board), "--bundled"])
    assert shown.exit_code == 0, shown.output
    assert "first_pin" in shown.output
    assert str(board / "board.toml") in shown.output
    again = CliRunner().invoke(main, ["coe", "demo", str(board), "--bundled"])
    assert again.exit_code == 1
    assert "name a new folder" in again.output


@pytest.mark.parametrize("missing", ["PIL", "torch"])
def test_it_names_the_extra_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL.Image" if missing == "PIL" else missing, None)
    shown = CliRunner().invoke(main, ["coe", "demo", str(tmp_path / "board")])
    assert shown.exit_code == 1
    assert {"PIL": "greenroom[coe]", "torch": "greenroom[torch]"}[missing] in shown.output
    assert not (tmp_path / "board").exists()
