"""``greenroom.v1``: the modules are those of ``proto/``, and nothing that a caller relies on has changed."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest

from tests.contract.protos.generate import PACKAGE, ROOT, generate
from tests.contract.protos.interface import HOW, SNAPSHOT, Interface, breaks, described, load

COMMITTED = ROOT / "services" / PACKAGE


@pytest.mark.skipif(
    importlib.util.find_spec("grpc_tools") is None or importlib.util.find_spec("mypy_protobuf") is None,
    reason="grpcio-tools and mypy-protobuf are not installed",
)
def test_the_modules_are_those_of_the_protos(tmp_path: Path) -> None:
    made = {path.name: path.read_text() for path in generate(tmp_path)}
    committed = {path.name: path.read_text() for path in sorted(COMMITTED.glob("*_pb2*")) if path.is_file()}
    assert sorted(made) == sorted(committed), "run `make proto` and commit services/greenroom/v1"
    stale = [name for name in made if made[name] != committed[name]]
    assert not stale, f"{stale} differ from proto/: run `make proto` and commit services/greenroom/v1"


def test_nothing_that_callers_rely_on_has_changed() -> None:
    broken = breaks(load(SNAPSHOT), described())
    assert not broken, "\n".join(broken)


def test_what_is_new_is_in_the_snapshot_too() -> None:
    assert load(SNAPSHOT) == described(), "run `make proto` and commit tests/contract/protos/v1.json"


def _without(interface: Interface, kind: str, name: str, part: str | None = None) -> Interface:
    changed = copy.deepcopy(interface)
    if part is None:
        del changed[kind][name]
    else:
        del changed[kind][name][part]
    return changed


def _with(interface: Interface, kind: str, name: str, part: str, text: str) -> Interface:
    changed = copy.deepcopy(interface)
    changed[kind].setdefault(name, {})[part] = text
    return changed


V1 = load(SNAPSHOT)
RUN = "greenroom.v1.RunRequest"


@pytest.mark.parametrize(
    ("now", "complaint"),
    [
        (_without(V1, "messages", RUN), f"message {RUN} is gone"),
        (_without(V1, "messages", RUN, "4"), f"{RUN} 4 is gone: it was `bytes task`"),
        (_with(_without(V1, "messages", RUN, "4"), "messages", RUN, "5", "bytes task"), f"{RUN} 4 is gone"),
        (_with(V1, "messages", RUN, "4", "string task"), f"{RUN} 4 was `bytes task` and is `string task`"),
        (_with(V1, "messages", RUN, "4", "repeated bytes task"), "is `repeated bytes task`"),
        (_with(V1, "messages", RUN, "4", "optional bytes task"), "is `optional bytes task`"),
        (_with(V1, "messages", RUN, "4", "bytes task of oneof what"), "is `bytes task of oneof what`"),
        (_with(V1, "messages", RUN, "4", "bytes job"), "is `bytes job`"),
        (_without(V1, "enums", "greenroom.v1.EndReason", "6"), "greenroom.v1.EndReason 6 is gone"),
        (_without(V1, "enums", "greenroom.v1.EndReason"), "enum greenroom.v1.EndReason is gone"),
        (_without(V1, "services", "greenroom.v1.Worker", "Run"), "greenroom.v1.Worker.Run is gone"),
        (_without(V1, "services", "greenroom.v1.Worker"), "service greenroom.v1.Worker is gone"),
        (
            _with(V1, "services", "greenroom.v1.Worker", "Run", f"{RUN} -> stream greenroom.v1.RunResponse"),
            "is `greenroom.v1.RunRequest -> stream greenroom.v1.RunResponse`",
        ),
    ],
)
def test_a_breaking_change_is_named_with_what_to_do(now: Interface, complaint: str) -> None:
    lines = breaks(V1, now)
    assert complaint in lines[0]
    assert lines[-1] == HOW


@pytest.mark.parametrize(
    "now",
    [
        _with(V1, "messages", RUN, "99", "string more"),
        _with(V1, "messages", "greenroom.v1.New", "1", "string more"),
        _with(V1, "enums", "greenroom.v1.EndReason", "99", "END_REASON_NEW"),
        _with(V1, "services", "greenroom.v1.Worker", "More", f"{RUN} -> {RUN}"),
    ],
)
def test_additions_break_no_caller(now: Interface) -> None:
    assert not breaks(V1, now)


def test_labels_come_out_as_they_are_written() -> None:
    """So that a change of label is seen at all."""
    request = described()["messages"]["greenroom.v1.GenerateRequest"]
    assert request["5"] == "optional uint32 max_tokens"
    assert request["8"] == "uint32 top_k"
    assert request["10"] == "repeated string stop"
    assert request["3"] == "string text of oneof prompt"
    assert described()["services"]["greenroom.v1.Tokens"] == {
        "Deliver": "stream greenroom.v1.FromWorker -> stream greenroom.v1.FromGateway"
    }
