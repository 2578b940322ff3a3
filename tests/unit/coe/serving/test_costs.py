"""Costs by a quick measurement, and out of a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from greenroom.coe.computing.expert_computer import ExpertComputer
from greenroom.coe.computing.inputs import Preparations
from greenroom.coe.loading.architecture import build_architectures
from greenroom.coe.loading.collaboration import read_collaboration
from greenroom.coe.loading.packing import ensure_pack
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.costs import MOST_UNPROFILED, measure_quickly
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.core.errors import InvalidConfig
from greenroom.experts.pack.pack_file import PackFile
from tests.quiet_transformers import no_progress_bars as no_progress_bars
from tests.random_experts import save_board


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
