"""The file of a collaboration's profile: whole or refused, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from greenroom.core.coe_profile import dump_coe_profile, load_coe_profile, parse_coe_profile
from greenroom.core.errors import InvalidConfig
from tests.coe_profiles import MACHINE, small_profile

EXPERTS = {"resistor": "small", "turned": "small", "chip": "large"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(dump_coe_profile(small_profile()))
    assert load_coe_profile(path) == small_profile()
    assert load_coe_profile(path).kinds["cpu"].expert_share == 0.5


def _nan(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["architectures"]["small"]["load_ms"] = "fast"


def _unknown_architecture(data: dict[str, Any]) -> None:
    data["experts"]["chip"] = "huge"


def _not_measured(data: dict[str, Any]) -> None:
    del data["kinds"]["cpu"]["architectures"]["large"]


def _no_such_trial(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["executors"] = 3


def _more_than_all(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["trials"]["2"]["expert_bytes"] = 80_001


def _shrinks(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["architectures"]["small"]["bytes_by_batch"]["8"] = 10


def _lacks_a_count(data: dict[str, Any]) -> None:
    del data["kinds"]["cpu"]["architectures"]["large"]["by_executors"]["2"]


def _window(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["trials"]["1"]["window"] = [3, 3]


def _not_tried(data: dict[str, Any]) -> None:
    data["kinds"]["cpu"]["trials"]["1"]["residents"] = 19


def _other_format(data: dict[str, Any]) -> None:
    data["format"] = "greenroom-model-profile"


def _other_version(data: dict[str, Any]) -> None:
    data["version"] = 2


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (_nan, "load_ms"),
        (_unknown_architecture, "which expert 'chip' is of"),
        (_not_measured, "architectures lacks 'large'"),
        (_no_such_trial, "none of 3 executors"),
        (_more_than_all, "at most all 80000 bytes"),
        (_shrinks, "a batch of 8 takes no fewer bytes than one of 4"),
        (_lacks_a_count, "by_executors lacks 2"),
        (_window, "above its lower one"),
        (_not_tried, "chosen and drawn"),
        (_other_format, "greenroom coe profile"),
        (_other_version, "greenroom coe profile"),
    ],
)
def test_a_broken_file_is_refused_by_name(breaks: Callable[[dict[str, Any]], None], says: str) -> None:
    data = json.loads(dump_coe_profile(small_profile()))
    breaks(data)
    with pytest.raises(InvalidConfig, match=says) as raised:
        parse_coe_profile(json.dumps(data).encode(), "profile.json")
    assert "profile.json" in str(raised.value)


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_profile_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidConfig, match="made by `greenroom coe profile`"):
        parse_coe_profile(data, "profile.json")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"nothing\.json.*No such file"):
        load_coe_profile(tmp_path / "nothing.json")


def test_another_collaborations_is_refused_by_what_differs() -> None:
    profile = small_profile()
    profile.check_of("board", EXPERTS, "profile.json")
    with pytest.raises(InvalidConfig, match=r"profile of 'board', and this is 'line'"):
        profile.check_of("line", EXPERTS, "profile.json")
    with pytest.raises(InvalidConfig, match="knows no expert 'relay'"):
        profile.check_of("board", {**EXPERTS, "relay": "small"}, "profile.json")
    with pytest.raises(InvalidConfig, match="'turned' had another architecture"):
        profile.check_of("board", {**EXPERTS, "turned": "large"}, "profile.json")


def test_another_machine_is_said() -> None:
    assert small_profile().said_of_machine(MACHINE) is None
    said = small_profile().said_of_machine("another, 64 cores")
    assert said is not None
    assert MACHINE in said
    assert "another, 64 cores" in said


def test_a_kind_that_was_not_measured_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="has cpu"):
        small_profile().of_kind("cuda")


def test_times_for_numbers_of_executors_that_were_not_measured() -> None:
    own = small_profile().kinds["cpu"]
    assert own.times("small", 1).request_ms == 1.0
    assert own.times("small", 2).request_ms == 2.0
    assert own.times("small", 5).request_ms == 2.0
