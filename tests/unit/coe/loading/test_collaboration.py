from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from greenroom.coe.loading.collaboration import POOLING, read_collaboration
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, UnsupportedModel
from tests.random_experts import save_board, save_expert


def test_a_board(tmp_path: Path) -> None:
    found = read_collaboration(save_board(tmp_path))
    assert found.name == "board"
    assert [expert.model_class for expert in found.experts] == [
        "ResNetForImageClassification", "ResNetForImageClassification", "YolosForObjectDetection",
    ]  # fmt: skip
    assert list(found.of_architecture().values()) == [[0, 1], [2]]
    assert found.graph.usage().tolist() == pytest.approx([0.75, 0.25, 0.625])


def test_everything_is_checked_without_torch(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    script = (
        "import sys; from pathlib import Path; from greenroom.coe.loading.collaboration import read_collaboration; "
        "read_collaboration(Path(sys.argv[1])); assert not sys.modules.keys() & {'torch', 'transformers'}"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_a_label_that_the_checkpoint_has_not(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    save_expert("resnet", tmp_path / "experts" / "resistor", labels=("good", "worn", "burnt"))
    with pytest.raises(InvalidConfig, match=r"board\.toml: experts\.resistor\.next\[0\]: 'broken' is not allowed"):
        read_collaboration(file)


def test_an_embedding_has_no_labels(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"experts\.resistor\.next\[0\]: 'broken' .*0"):
        read_collaboration(save_board(tmp_path, ("resnet_embedding", "resnet", "yolos")))


def test_errors_name_the_file_and_the_expert(tmp_path: Path) -> None:
    file = save_board(tmp_path)
    (tmp_path / "experts" / "chip" / "preprocessor_config.json").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"board\.toml: experts\.chip: experts/chip has no preprocessor"):
        read_collaboration(file)
    (tmp_path / "experts" / "resistor" / "model.safetensors").rename(
        tmp_path / "experts" / "resistor" / "pytorch_model.bin"
    )
    with pytest.raises(UnsupportedModel, match=r"board\.toml: experts\.resistor: experts/resistor has its weights as"):
        read_collaboration(file)


def test_one_request_has_one_kind_of_input(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"experts\.resistor: \"an image for it, then a text for 'turned'"):
        read_collaboration(save_board(tmp_path, ("resnet", "resnet", "bert")))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('model = "experts/none"', r"experts\.chip\.model: 'experts/none' .*no folder .*experts/none; a hub id needs"),
        ('model = "experts/chip"\nrevision = "main"', r"experts\.chip\.revision: 'main' .*is a folder"),
    ],
)
def test_a_model_that_is_not_there(tmp_path: Path, line: str, message: str) -> None:
    file = save_board(tmp_path)
    file.write_text(file.read_text().replace('model = "experts/chip"', line))
    with pytest.raises(InvalidConfig, match=message):
        read_collaboration(file)


def test_the_working_folder_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_board(tmp_path / "board")
    (tmp_path / "elsewhere" / "experts" / "chip").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_collaboration(file).experts[1].folder == tmp_path / "board" / "experts" / "chip"


def test_a_hub_id_is_downloaded_at_its_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save_board(tmp_path)
    hub = save_expert("resnet", tmp_path / "hub" / "c0ffee", seed=1)
    file.write_text(file.read_text().replace('model = "experts/chip"', 'model = "team/chip"\nrevision = "v1"'))
    asked: list[tuple[str, str, tuple[str, ...], list[str]]] = []

    def download(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str], **_: Any) -> str:
        asked.append((model, revision, tuple(allow_patterns), ignore_patterns))
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_collaboration(file).experts[1].folder == hub
    assert [(model, revision) for model, revision, *_ in asked] == [
        ("team/chip", "v1"), ("team/chip", "c0ffee"), ("team/chip", "c0ffee"),
    ]  # fmt: skip
    assert asked[1][2:] == ((POOLING,), [])
    assert asked[2][2] == ("model.safetensors",)
