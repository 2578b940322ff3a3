"""A real process and real signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_PROCESS = """
import asyncio, sys
from greenroom.fabric.lifecycle import Part, LifeConfig, ProbesConfig, configure_logs, name_process, run_service

class Told(Part):
    unready = None
    async def start(self):
        if "fail" in sys.argv:
            self.tasks.start(self.breaks(), name="loop")
    async def breaks(self):
        raise OSError("the disk is full")
    async def drain(self, timeout_s):
        print("draining", flush=True)
        if "slow" in sys.argv:
            await asyncio.Event().wait()

configure_logs("info", "json", sys.stdout)
name_process("told", "told-1")
sys.exit(asyncio.run(run_service([Told("told")], LifeConfig(drain_timeout_s=60), probes=ProbesConfig())))
"""


@contextmanager
def _running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str], part: str) -> str:
    """The next line with ``part`` in it."""
    assert process.stdout is not None
    for line in process.stdout:
        if part in line:
            return line
    raise AssertionError(f"it ended without saying {part!r}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_stops_and_exits_with_0(number: signal.Signals) -> None:
    with _running() as process:
        url = json.loads(_line(process, "/health"))["message"].split(" at ")[1]
        _line(process, '"ready"')
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert json.load(answer) == {"status": "ready"}
        process.send_signal(number)
        _line(process, "draining")
        assert process.wait(timeout=20) == 0


def test_while_it_drains_health_says_so_and_a_second_signal_ends_it() -> None:
    with _running("slow") as process:
        url = json.loads(_line(process, "/health"))["message"].split(" at ")[1]
        _line(process, '"ready"')
        process.send_signal(signal.SIGTERM)
        _line(process, "draining")
        with pytest.raises(urllib.error.HTTPError) as raised:
            urllib.request.urlopen(f"{url}/health", timeout=10)
        with raised.value as answer:
            assert answer.code == 503
            assert json.load(answer) == {"status": "not ready", "reason": "stopping"}
        with urllib.request.urlopen(f"{url}/live", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 128 + signal.SIGTERM


def test_a_failure_ends_it_with_1_and_the_reason_in_the_log() -> None:
    with _running("fail") as process:
        line = json.loads(_line(process, "ending, since"))
        assert line["message"] == "ending, since told failed: OSError: the disk is full"
        assert line["level"] == "error"
        assert (line["service"], line["instance"]) == ("told", "told-1")
        assert process.wait(timeout=20) == 1
