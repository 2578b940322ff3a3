"""What a test run, or `make kafka`, has started ends with it, however it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.kafka.broker import Broker, free_port
from tests.kafka.fixtures import kafka_broker as kafka_broker
from tests.kafka.probe import answers
from tests.waiting import DEADLINE_S, until_others

ROOT = Path(__file__).resolve().parents[2]

# As it is collected it starts a process that has a session and a child of its own, as a broker has.
HANGING = """
import subprocess, time
script = "cd $PIDS; sleep 1000 & echo $! > $$.part; mv $$.part $$; wait"
child = subprocess.Popen(["sh", "-c", script], start_new_session=True)
time.sleep(1000)
"""

# Where the tests themselves run in the background, interrupts are ignored, and their children inherit that.
PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main())
"""


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("workers", "how"),
    [(0, signal.SIGKILL), pytest.param(2, signal.SIGKILL, marks=pytest.mark.full), (2, signal.SIGINT)],
    ids=lambda value: str(value),
)
def test_an_ended_test_run_leaves_no_process_behind(tmp_path: Path, workers: int, how: signal.Signals) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    (tmp_path / "test_hanging.py").write_text(HANGING)
    plugins = ["tests.conftest", "no:cacheprovider", *(["xdist.plugin"] if workers else [])]
    options = [word for plugin in plugins for word in ("-p", plugin)]
    run = subprocess.Popen(
        [sys.executable, "-c", PYTEST, *options, *([f"-n{workers}"] if workers else []), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PIDS": str(pids), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with run:
        try:
            until_others(lambda: sum(path.name.isdecimal() for path in pids.iterdir()) == max(workers, 1), run.poll)
            started = [int(number) for path in pids.iterdir() for number in (path.name, path.read_text())]
            assert all(runs(pid) for pid in started)
            run.send_signal(how)
            until_others(lambda: not any(runs(pid) for pid in started), lambda: [pid for pid in started if runs(pid)])
        finally:
            run.kill()  # one that is interrupted waits for its workers


def kafka(port: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.kafka", "--port", str(port)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_port_that_another_broker_has_is_refused(kafka_broker: Broker) -> None:
    with kafka(kafka_broker.port) as second:
        out, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 1
    assert out == f"port {kafka_broker.port} of 127.0.0.1 is taken: another process listens there, maybe a broker\n"


def test_the_broker_of_a_developer_goes_with_its_command_though_that_is_killed() -> None:
    port = free_port()
    with kafka(port) as command:
        try:
            assert command.stdout is not None
            said = ""
            while (certificate := re.search(r"GREENROOM_KAFKA_CA=(\S+)/broker.pem", said)) is None:
                line = command.stdout.readline()
                assert line, said
                said += line
            folder = Path(certificate[1])
            assert answers("127.0.0.1", port)
        finally:
            command.kill()
        until_others(lambda: not answers("127.0.0.1", port) and not folder.exists(), lambda: folder)
