"""What experts are measured with."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from PIL import Image

from greenroom.coe.loading.expert_checkpoint import InputKind, read_expert
from greenroom.core.errors import InvalidConfig
from greenroom.profiling.coe.sample_inputs import inputs_of, random_images, random_texts, read_samples
from tests.random_experts import save_expert


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


@pytest.mark.parametrize(
    ("family", "settings", "size"),
    [
        ("vit", {}, (32, 32)),
        ("resnet", {}, (32, 32)),
        ("yolos", {}, (48, 32)),
        ("detr", {"size": 40, "max_size": 60}, (60, 40)),
        ("detr", {"size": None}, (1333, 800)),
    ],
)
def test_random_images_are_those_of_which_the_processor_makes_most(
    tmp_path: Path, family: str, settings: dict[str, object], size: tuple[int, int]
) -> None:
    """Settings as older checkpoints have them, too, and the processor's own where they say nothing."""
    folder = save_expert(family, tmp_path / "one")
    file = folder / "preprocessor_config.json"
    kept = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({name: value for name, value in kept.items() if value is not None}))
    made = inputs_of(read_expert(folder, "one"), None, None, seed=0)
    assert {Image.open(io.BytesIO(data)).size for data in made if isinstance(data, bytes)} == {size}
