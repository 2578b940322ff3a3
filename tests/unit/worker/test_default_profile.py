"""Which profile a model goes by where none is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.model_options import worker_config
from greenroom.core.model_profile import dump_model_profile
from greenroom.demo import bundled_profile_path
from tests.unit.policies.model_profiles import model_profile, task_profile

PROFILE = dump_model_profile(model_profile({"sort": task_profile([[1.0, 1.0]])}))


def profile_of(model: Path | None, **options: Any) -> Path | None:
    given = {"model": None if model is None else str(model), "revision": None, "policy_options": "{}"}
    return worker_config({**given, **options}).profile


def test_the_one_in_the_models_folder(tmp_path: Path) -> None:
    assert profile_of(tmp_path) is None
    (tmp_path / "profile.json").write_bytes(PROFILE)
    assert profile_of(tmp_path) == tmp_path / "profile.json"
    assert profile_of(tmp_path, fidelity="sensitive") == tmp_path / "profile.json"
    assert profile_of(None) == bundled_profile_path()


def test_the_one_that_is_named_goes_before(tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_bytes(PROFILE)
    assert profile_of(tmp_path, profile=tmp_path / "another.json") == tmp_path / "another.json"


def test_a_file_of_that_name_that_is_no_profile_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile.json").write_text('{"format": "another"}')
    with caplog.at_level(logging.WARNING):
        assert profile_of(tmp_path) is None
    assert "profile.json" in caplog.text
