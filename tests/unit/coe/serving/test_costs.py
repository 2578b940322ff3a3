"""Costs by a quick measurement, and out of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Preparations
from greenroom.coe.computing.intermediates import intermediate_bytes
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.costs import MOST_UNPROFILED, measure_quickly
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.core.errors import CorruptCheckpoint, InvalidConfig, PackDamaged
from greenroom.experts.pack.pack_file import PackFile
from tests.contract.coe.single_expert import collaborate, record_of
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import save_board, save_expert


def test_no_time_is_zero(tmp_path: Path) -> None:
    """Of experts that take images, a detector among them: all three have costs, those of one architecture the same."""
    collaboration = read_collaboration(save_board(tmp_path))
    architectures = build_architectures(collaboration)
    pack = PackFile.open(ensure_pack(collaboration, architectures, tmp_path / "cache"))
    told: list[int] = []
    costs = measure_quickly(
        collaboration,
        ExpertComputer(collaboration, architectures, Preparations()),
        pack,
        lambda: told.append(1),
    )
    pack.close()
    assert len(told) == len(architectures) == 2
    for expert in range(3):
        own = costs.costs
        assert min(own.request_ms(expert), own.batch_ms_of(expert), own.load_ms(expert)) > 0
        assert costs.bytes_by_batch[expert][8] > costs.bytes_by_batch[expert][1] > 0
    resistor, chip, _ = (costs.costs.request_ms(expert) for expert in range(3))
    assert resistor == chip
    assert list(costs.most) == [MOST_UNPROFILED] * 3


def test_memory_is_that_of_the_longest_texts(tmp_path: Path) -> None:
    experts = collaborate(tmp_path / "one.toml", [save_expert("bert", tmp_path / "one")])
    pack = PackFile.open(ensure_pack(experts.collaboration, experts.architectures, tmp_path / "cache"))
    costs = measure_quickly(experts.collaboration, experts.computer, pack)
    pack.close()
    longest = ["good " * 600] * 8
    needed = intermediate_bytes(experts.computer, 0, list(longest), record_of(experts, 0))
    short = intermediate_bytes(experts.computer, 0, ["good"] * 8, record_of(experts, 0))
    assert costs.bytes_by_batch[0][8] >= needed > 2 * short


@pytest.mark.parametrize(
    ("name", "changed"),
    [("preprocessor_config.json", {"image_mean": [0.1, 0.2]}), ("config.json", {"return_dict": False})],
)
def test_an_expert_that_can_compute_nothing_is_named(tmp_path: Path, name: str, changed: dict[str, object]) -> None:
    file = save_board(tmp_path)
    for expert in ("resistor", "chip"):
        settings = tmp_path / "experts" / expert / name
        settings.write_text(json.dumps(json.loads(settings.read_text()) | changed))
    with pytest.raises(CorruptCheckpoint, match=r"board\.toml: experts\.resistor: it can not compute a sample"):
        CollaborationRuntime(ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1))


def test_a_damaged_record_is_measured_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails the requests that need it, not the start; unless no expert of its architecture can be read."""
    file = save_board(tmp_path)
    read_into, broken = PackFile.read_into, {0}

    def damaged(pack: PackFile, layer: int, expert: int, into: memoryview) -> int:
        if layer in broken:
            raise PackDamaged("altered")
        return read_into(pack, layer, expert, into)

    monkeypatch.setattr(PackFile, "read_into", damaged)
    config = ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)
    with CollaborationRuntime(config) as runtime:
        assert runtime.engine.alive
    broken.add(1)
    with pytest.raises(PackDamaged):
        CollaborationRuntime(config)


def test_a_wrong_profile_is_refused_where_it_was_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = save_board(tmp_path)
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(InvalidConfig, match=r"profile\.json"):
        CollaborationRuntime(
            ServingConfig(file=file, cache_dir=tmp_path / "cache", profile=tmp_path / "profile.json", executors=1)
        )
    with CollaborationRuntime(ServingConfig(file=file, cache_dir=tmp_path / "cache", executors=1)) as runtime:
        assert runtime.profile is None
    assert "goes without a profile" in caplog.text
