"""What a start takes up out of the model's folder."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.artifacts.policy_artifacts import POLICY_ARTIFACTS
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.core.model_profile import PROFILE_FILE
from greenroom.demo import bundled_model_path
from greenroom.llm import _config_of
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.predictor.kinds.reuse.fit import KEEP
from greenroom.worker.model.files_beside import files_beside
from greenroom.worker.model.files_of_other_models import without_others


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = ReuseFile(
        model="", experts_per_layer=(4, 4), sequences=1, keep=np.array(KEEP, dtype=np.float32),
        weights=np.zeros((2, len(KEEP) + 1), dtype=np.float32), bias=np.zeros(8, dtype=np.float32),
        followers=np.zeros(0, dtype=np.float32),
    )  # fmt: skip
    made.write(tmp_path / "reuse.safetensors")
    return tmp_path


def test_what_the_policy_takes_and_nobody_named(folder: Path) -> None:
    found = {"reuse": folder / "reuse.safetensors"}
    assert files_beside(folder, "reuse", {}, ()) == found
    assert files_beside(folder, "duoserve", {}, ()) == found
    assert files_beside(folder, "duoserve", {}, {"reuse"}) == {}
    assert files_beside(folder, "lru", {}, ()) == {}
    assert files_beside(folder, "nobody", {}, ()) == {}


def test_what_can_not_be_used_is_passed_over_with_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "path.safetensors").write_bytes(b"nothing")
    (folder / "profile.json").write_bytes(b"{}")
    (folder / "residual.safetensors").write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING):
        found = files_beside(folder, "duoserve", {}, ())
    assert found == {"reuse": folder / "reuse.safetensors"}
    assert caplog.text.count("can not be used") == 3


def test_what_is_missing_is_said_as_loud_as_it_matters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        literal = {"literal": True}
        for policy, options in (
            ("duoserve", {}), ("moe-infinity", {}), ("duoserve", literal), ("expertflow", literal),
        ):  # fmt: skip
            assert files_beside(tmp_path, policy, options, ()) == {}
    said = {kind: [one.levelno for one in caplog.records if f"{kind}.safetensors" in one.getMessage()]
            for kind in POLICY_ARTIFACTS}  # fmt: skip
    assert said == {
        "eamc": [logging.WARNING], "path": [logging.INFO], "paths": [logging.WARNING], "reuse": [logging.INFO],
        "expert_mlp": [],
    }  # fmt: skip


def test_the_python_engine_takes_them_up_too(folder: Path) -> None:
    assert _config_of(str(folder), {}).reuse == folder / "reuse.safetensors"
    other = folder / "other.safetensors"
    assert _config_of(str(folder), {"policy": "reuse", "reuse": other}).reuse == other
    assert _config_of(str(folder), {"policy": "lru"}).reuse is None
    assert _config_of("someone/a-model", {}).reuse is None


def catalogue(*, layers: int, experts: int) -> Catalogue:
    return Catalogue("model", experts_per_layer=[experts] * layers, top_k=[2] * layers, expert_bytes=[1] * layers)


def test_what_is_another_models_is_passed_over_with_a_word(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(bundled_model_path() / PROFILE_FILE, folder)  # 6 layers of 16; reuse's are 2 of 4
    config = _config_of(str(folder), {"policy": "reuse"})
    with caplog.at_level(logging.WARNING):
        of_profile = without_others(config, catalogue(layers=6, experts=16), hidden=8, model="a")
        of_reuse = without_others(config, catalogue(layers=2, experts=4), hidden=8, model="a")
    assert (of_profile.profile, of_profile.reuse) == (folder / PROFILE_FILE, None)
    assert (of_reuse.profile, of_reuse.reuse) == (None, folder / "reuse.safetensors")
    assert caplog.text.count("another model's:") == 2
    assert str(folder / PROFILE_FILE) in caplog.text


def test_what_was_named_is_not_passed_over(folder: Path) -> None:
    named = _config_of(str(folder), {"policy": "reuse", "reuse": folder / "reuse.safetensors"})
    assert without_others(named, catalogue(layers=6, experts=16), hidden=8, model="a") == named


def test_a_fidelity_that_needs_the_profile_is_refused(folder: Path) -> None:
    shutil.copy(bundled_model_path() / PROFILE_FILE, folder)
    config = _config_of(str(folder), {"fidelity": "sensitive"})
    with pytest.raises(InvalidConfig, match="profile"):
        without_others(config, catalogue(layers=2, experts=4), hidden=8, model="a")
