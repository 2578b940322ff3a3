"""The remembered set is a hint: right when it fits, ignored when it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from greenroom.policies.base.events import Tier
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.expert_policy import Target
from greenroom.worker.model.warm_start import ResidentSetFile, first_residents

CATALOGUE = Catalogue.uniform("m", layers=3, experts=4, top_k=2)


def test_what_was_resident_comes_back(tmp_path: Path) -> None:
    file = ResidentSetFile(tmp_path / "x.pack")
    file.save(CATALOGUE, [11, 0, 5])
    assert file.load(CATALOGUE) == [11, 0, 5]
    assert [f.name for f in tmp_path.iterdir()] == ["x.resident.json"]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"experts":[[0,9]]}', b'{"experts":[[-1,0]]}', b'{"experts":[["a",0]]}']
)
def test_anything_unusable_is_ignored(tmp_path: Path, content: bytes) -> None:
    file = ResidentSetFile(tmp_path / "x.pack")
    assert file.load(CATALOGUE) == []
    file.path.write_bytes(content)
    assert file.load(CATALOGUE) == []


def test_a_folder_that_can_not_be_written_is_no_error(tmp_path: Path) -> None:
    ResidentSetFile(tmp_path / "none" / "x.pack").save(CATALOGUE, [1])


def test_the_others_follow_layer_by_layer_in_turn() -> None:
    assert first_residents(CATALOGUE, []) == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert first_residents(CATALOGUE, [9, 2, 9])[:4] == [9, 2, 0, 4]
    assert sorted(first_residents(CATALOGUE, [9, 2])) == list(range(12))
    assert first_residents(CATALOGUE, [9, 2], order=np.arange(12))[:5] == [9, 2, 0, 1, 3]


def test_what_the_policy_wants_on_the_device_comes_first() -> None:
    wanted = np.zeros(CATALOGUE.size, dtype=np.bool_)
    wanted[[3, 7]] = True
    assert first_residents(CATALOGUE, [9, 7], Target(0, wanted))[:5] == [3, 7, 9, 0, 4]
    assert first_residents(CATALOGUE, [9, 7], Target(0, wanted, Tier.HOST))[:4] == [9, 7, 0, 4]
