"""What experts are measured with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from greenroom.coe.loading.expert_checkpoint import InputKind
from greenroom.core.errors import InvalidConfig
from greenroom.profiling.coe.sample_inputs import random_images, random_texts, read_samples, side_of


def test_a_folder_of_images(tmp_path: Path) -> None:
    for name, data in zip(("b.png", "a.PNG"), random_images(8, 6, 2, 0), strict=True):
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("not one")
    found = read_samples(tmp_path)
    assert found.images == ((tmp_path / "a.PNG").read_bytes(), (tmp_path / "b.png").read_bytes())
    assert found.of(InputKind.IMAGE) == found.images
    assert not found.of(InputKind.TEXT)


def test_texts_are_lines(tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("good\n\n  \nbad part\n")
    assert read_samples(file).texts == ("good", "bad part")


def test_json_lines_as_the_demo_writes_them(tmp_path: Path) -> None:
    (image,) = random_images(8, 8, 1, 0)
    (tmp_path / "one.png").write_bytes(image)
    rows = [{"file": "one.png", "component": "R1", "experts": ["resistor"]}, {"text": "a text", "experts": ["a", "b"]}]
    file = tmp_path / "samples.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    found = read_samples(file)
    assert (found.images, found.texts) == ((image,), ("a text",))
    assert found.paths == (("resistor",), ("a", "b"))


@pytest.mark.parametrize("line", ["{", "[]", '{"other": 1}', '{"file": "gone.png"}', '{"file": 3}'])
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "samples.jsonl"
    file.write_text(line)
    with pytest.raises(InvalidConfig, match=r"samples\.jsonl"):
        read_samples(file)


def test_nothing_to_measure_with_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="it has no samples"):
        read_samples(tmp_path)


def test_random_images_have_the_size_and_follow_from_the_seed() -> None:
    made = random_images(12, 8, 3, seed=5)
    assert [Image.open(io.BytesIO(data)).size for data in made] == [(12, 8)] * 3
    assert made == random_images(12, 8, 3, seed=5)
    assert len(set(made)) == 3


def test_random_texts_have_the_words() -> None:
    assert [len(text.split()) for text in random_texts(5, 2, seed=0)] == [5, 5]


def test_sides_as_image_processors_write_them() -> None:
    assert side_of(32, "width") == 32
    assert side_of({"height": 8, "width": 12}, "width") == 12
    assert side_of({"shortest_edge": 40}, "height") == 40
    assert side_of(None, "width") == 224
