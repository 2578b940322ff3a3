"""API keys: made, kept, recognised, revoked."""

from __future__ import annotations

import os
import re
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from greenroom.cli.keys import keys as keys_command
from greenroom.cli.keys import parse_rate
from greenroom.core.errors import InvalidConfig
from greenroom.gateway.doors import doorkeeper as module
from greenroom.gateway.doors.doorkeeper import ANYONE, Doorkeeper
from greenroom.gateway.doors.keys import KeyFile, KeyLimits, changing, new_key, read_keys, recognise, write_keys
from greenroom.gateway.errors import ApiError

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def add(path: Path, name: str, **limits: Any) -> str:
    key, text = new_key(name, KeyLimits(**limits), NOW)
    with changing(path) as present:
        write_keys(path, present.add(key))
    return text


def revoke(path: Path, name: str) -> None:
    with changing(path) as present:
        write_keys(path, present.revoke(name, NOW))


def bearer(text: str) -> str:
    return f"Bearer {text}"


def test_a_key_is_known_by_its_look_and_holds_256_bits() -> None:
    texts = {new_key("ann", KeyLimits(), NOW)[1] for _ in range(50)}
    assert len(texts) == 50
    assert all(re.fullmatch(r"grk_[a-z2-7]{12}_[A-Za-z0-9_-]{43}", text) for text in texts)


def test_the_file_has_no_key_in_it_and_only_its_owner_reads_it(path: Path) -> None:
    text = add(path, "ann", rate_per_minute=60, max_concurrent=3, token_limit=100)
    raw = path.read_bytes()
    assert text.encode() not in raw
    assert text.split("_", 2)[2].encode() not in raw
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    [key] = read_keys(path).keys
    assert (key.name, key.limits) == ("ann", KeyLimits(rate_per_minute=60, max_concurrent=3, token_limit=100))
    assert (key.created, key.revoked) == (NOW, None)


def test_a_key_is_recognised_and_nothing_else_is(path: Path) -> None:
    text, other = add(path, "ann"), add(path, "bob")
    live = read_keys(path).live()
    found = recognise(live, text)
    assert found is not None
    assert found.name == "ann"
    swapped = text[:17] + other[17:]
    for wrong in ("", "grk_", text[:-1], text + "A", text.upper(), swapped, f" {text}", "grk_" + "é" * 56):
        assert recognise(live, wrong) is None, wrong


def test_two_live_keys_have_two_names(path: Path) -> None:
    add(path, "ann")
    with pytest.raises(InvalidConfig, match="a key of that name is in use; revoke it first"):
        add(path, "ann")
    revoke(path, "ann")
    add(path, "ann")
    assert [key.revoked is None for key in read_keys(path).keys] == [False, True]
    with pytest.raises(InvalidConfig, match="names of keys in use: ann"):
        revoke(path, "bob")


@pytest.mark.parametrize("name", ["", "a b", "-ann", "a" * 65, "a\n", "ä"])
def test_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidConfig, match="1 to 64 letters"):
        new_key(name, KeyLimits(), NOW)


@pytest.mark.parametrize(
    "limits",
    [
        {"rate_per_minute": 0},
        {"rate_per_minute": float("inf")},
        {"max_concurrent": 0},
        {"token_limit": 1},
        {"max_priority": 101},
        {"max_priority": -101},
    ],
)
def test_a_bad_limit_is_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        KeyLimits(**limits)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b'{"version": 2, "keys": []}', b'{"version": 1, "keys": [{"id": "x"}]}', b"\xff",
        b'{"version": 1, "keys": [], "more": 1}',
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_named(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    with pytest.raises(InvalidConfig, match=f"keys_file: '{path}' is not allowed; it is no file of keys"):
        read_keys(path)


def test_a_missing_file_says_how_to_make_one(path: Path) -> None:
    with pytest.raises(InvalidConfig, match="greenroom keys add NAME --keys-file"):
        Doorkeeper(path)


def test_a_write_that_fails_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(path, "ann")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(InvalidConfig, match="No space left"):
        add(path, "bob")
    assert path.read_bytes() == before
    assert not [
        other for other in path.parent.iterdir() if other.name.startswith(f".{path.name}.") and "lock" not in other.name
    ]


def test_commands_at_once_lose_nothing(path: Path) -> None:
    threads = [threading.Thread(target=add, args=(path, f"user-{number}")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_keys(path).keys) == 8


def test_without_a_file_no_key_is_needed() -> None:
    assert Doorkeeper(None).admit(None, 0.0) is ANYONE
    assert Doorkeeper(None).admit("Bearer none", 0.0) is ANYONE


def test_which_keys_are_admitted(path: Path) -> None:
    text = add(path, "ann", max_concurrent=2)
    door = Doorkeeper(path)
    for authorization in (bearer(text), f"bearer {text}", f"BEARER  {text} "):
        caller = door.admit(authorization, 0.0)
        assert (caller.name, caller.limits.max_concurrent) == ("ann", 2)
    for missing in (None, ""):
        with pytest.raises(ApiError, match="Authorization: Bearer KEY") as refused:
            door.admit(missing, 0.0)
        assert (refused.value.status, refused.value.code) == (401, "missing_api_key")
        assert refused.value.headers["WWW-Authenticate"] == 'Bearer realm="greenroom"'
    for wrong in (text, f"Basic {text}", "Bearer", "Bearer none", bearer(text[:-1])):
        with pytest.raises(ApiError) as refused:
            door.admit(wrong, 0.0)
        assert (refused.value.status, refused.value.code) == (401, "invalid_api_key")
        assert 'error="invalid_token"' in refused.value.headers["WWW-Authenticate"]


def test_a_change_of_the_file_is_seen_within_a_second(path: Path) -> None:
    ann = add(path, "ann")
    door = Doorkeeper(path)
    assert door.admit(bearer(ann), 10.0).name == "ann"
    bob = add(path, "bob")
    revoke(path, "ann")
    later = 10.0 + module.LOOK_AGAIN_S
    assert door.admit(bearer(bob), later).name == "bob"
    with pytest.raises(ApiError):
        door.admit(bearer(ann), later)


def test_a_broken_file_leaves_the_keys_as_they_were(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = add(path, "ann")
    door = Doorkeeper(path)
    path.write_bytes(b"{")
    assert door.admit(bearer(text), 5.0).name == "ann"
    assert "the keys read before stay in use" in caplog.text
    path.unlink()
    assert door.admit(bearer(text), 10.0).name == "ann"
    write_keys(path, KeyFile())
    with pytest.raises(ApiError):
        door.admit(bearer(text), 15.0)


def test_the_commands(path: Path) -> None:
    runner = CliRunner()

    def run(*arguments: str) -> Any:
        return runner.invoke(keys_command, [*arguments, "--keys-file", str(path)], catch_exceptions=False)

    limits = ("--rate-limit", "90/min", "--max-concurrent", "4", "--token-limit", "512", "--max-priority", "7")
    made = run("add", "ann", *limits)
    assert made.exit_code == 0
    text = made.stdout.strip()
    assert Doorkeeper(path).admit(bearer(text), 0.0).limits == KeyLimits(
        rate_per_minute=90, max_concurrent=4, token_limit=512, max_priority=7
    )
    assert "shown this once" in made.stderr
    run("add", "bob")
    run("revoke", "bob")
    table = run("list").stdout
    assert re.search(r"^ann +[a-z2-7]{12} .* - +90/min +4 +512 +7$", table, re.MULTILINE)
    rows = msgspec.json.decode(run("list", "--json").stdout.encode())
    assert [(row["name"], row["revoked"] is None) for row in rows] == [("ann", True), ("bob", False)]
    with pytest.raises(InvalidConfig, match="names of keys in use: ann"):
        run("revoke", "bob")


def test_the_file_can_be_named_in_the_environment(path: Path) -> None:
    made = CliRunner().invoke(keys_command, ["add", "ann"], env={"GREENROOM_KEYS_FILE": str(path)})
    assert made.exit_code == 0
    assert [key.name for key in read_keys(path).keys] == ["ann"]


@pytest.mark.parametrize(("text", "rate"), [("60", 60), ("60/min", 60), ("2/s", 120), ("30 / h", 0.5), ("0.5/m", 0.5)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "x", "60/day", "0", "-1", "nan", "inf", "/min"])
def test_bad_rates_are_refused(text: str, path: Path) -> None:
    made = CliRunner().invoke(keys_command, ["add", "ann", "--rate-limit", text, "--keys-file", str(path)])
    assert made.exit_code == 2
    assert "such as 60 or 60/min" in made.stderr
    assert not path.exists()
