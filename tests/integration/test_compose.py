"""The containers: `docker compose up`, as a user does it, under clients that we did not write, and under failures.

Run by `make test-compose`. One stack for all tests, which go from top to bottom.
"""

from __future__ import annotations

import json
import re
import urllib.parse
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from greenroom.client import ClientError
from tests.deploy.compose import ROOT, services
from tests.integration.compose_stack import (
    INSTALL,
    Question,
    Reading,
    Stack,
    docker,
    engine_answers,
    reading_all,
)
from tests.waiting import until_others

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

MIB = 1024 * 1024
LONG = 900
QUESTIONS = [  # sampled, since greedy texts of such a length repeat themselves, which would hide a gap
    Question("The harbour was closed for repairs on Monday.", LONG, seed=5),
    Question("Compare: the lamp costs nine dollars, the chair four.", LONG, seed=6),
    Question("Summarise: the train was late, so everyone walked.", LONG, seed=7),
    Question("Hello! I am Leo.", LONG, seed=8),
]


@pytest.fixture(scope="module")
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    if not engine_answers():
        pytest.fail(INSTALL)
    stack = Stack("observability")
    stack.build()
    failed_before = request.session.testsfailed
    try:
        stack.up()
        stack.key = stack.compose("run", "--rm", "--no-TTY", "--no-deps", "keys", "add", "tester")
        yield stack
    finally:
        if request.session.testsfailed > failed_before:
            print(stack.logs(200))  # noqa: T201  # pytest shows it beside the failure
        stack.down()
    assert stack.left_over() == []


@pytest.fixture(scope="module")
def undisturbed(stack: Stack) -> dict[Question, str]:
    """What every question is answered where nothing fails."""
    with reading_all(stack, QUESTIONS) as readings:
        pass
    answers = {reading.question: reading.text for reading in readings}
    check_whole(readings, answers)
    return answers


def check_whole(readings: list[Reading], answers: dict[Question, str]) -> None:
    for reading in readings:
        assert reading.reason == "length"
        assert reading.text
        assert reading.text == answers[reading.question]


def test_images_hold_what_they_should(stack: Stack) -> None:
    size = {
        name: int(docker("image", "inspect", "--format", "{{.Size}}", f"greenroom-{name}:test"))
        for name in ("light", "torch")
    }
    assert size["light"] < 500 * MIB, f"{size['light'] / MIB:.0f} MiB"
    look = "import importlib.util as u; print([n for n in ('torch', 'transformers') if u.find_spec(n)])"
    run = ("run", "--rm", "--network", "none", "--read-only", "--entrypoint", "python")
    assert docker(*run, "greenroom-light:test", "-c", look) == "[]"
    assert docker(*run, "greenroom-torch:test", "-c", look) == "['torch', 'transformers']"
    compiled = "from greenroom.moe.native.rows import native_rows; print(native_rows() is not None)"
    assert docker(*run, "greenroom-torch:test", "-c", compiled) == "True"
    for name in size:
        # Each is pinned and installed by itself: whether one lacks another is not asked meanwhile.
        assert docker(*run, f"greenroom-{name}:test", "-m", "pip", "check") == "No broken requirements found."
        assert docker("image", "inspect", "--format", "{{.Config.User}}", f"greenroom-{name}:test") == "10001:10001"


def test_only_loopback_is_published_and_no_process_is_root(stack: Stack) -> None:
    for container in stack.compose("ps", "--quiet").split():
        found = stack.inspect(container)
        bindings = [binding for each in (found["NetworkSettings"]["Ports"] or {}).values() for binding in each or []]
        assert {binding["HostIp"] for binding in bindings} <= {"127.0.0.1"}
        user = docker("exec", container, "sh", "-c", "id -u")
        assert user != "0", found["Name"]


def test_no_request_without_a_key(stack: Stack) -> None:
    key, stack.key = stack.key, "grk_nobody"
    try:
        with stack.http() as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with stack.grpc() as client_, pytest.raises(ClientError) as refused:
            client_.model()
    finally:
        stack.key = key
    assert refused.value.status == "UNAUTHENTICATED"


REACH = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
        print(address, "open")
    except OSError as error:
        print(address, "shut")
"""
CALL = """
import pathlib, sys, grpc
from greenroom.v1 import worker_pb2, worker_pb2_grpc
address, how = sys.argv[1:]
options = [("grpc.ssl_target_name_override", "rpc.greenroom.internal")]
mine = pathlib.Path("/run/greenroom")
if how == "in the clear":
    channel = grpc.insecure_channel(address)
elif how == "by TLS alone":
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials((mine / "ca.pem").read_bytes()), options)
else:
    files = [(mine / name).read_bytes() for name in ("ca.pem", "key.pem", "certificate.pem")]
    channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(*files), options)
try:
    worker_pb2_grpc.WorkerStub(channel).ListRuns(worker_pb2.ListRunsRequest(), timeout=20)
    print("OK")
except grpc.RpcError as error:
    print(error.code().name)
"""
READ = """
import asyncio
from aiokafka import AIOKafkaConsumer
from aiokafka.errors import KafkaError
async def main():
    consumer = AIOKafkaConsumer(bootstrap_servers="kafka:9092", request_timeout_ms=5000)
    try:
        await consumer.start()
        print(sorted(await consumer.topics()))
    except (KafkaError, OSError):
        print("refused")
    finally:
        await consumer.stop()
asyncio.run(main())
"""


def _address(stack: Stack, service: str, network: str = "back") -> str:
    (container,) = stack.containers(service)
    networks = stack.inspect(container)["NetworkSettings"]["Networks"]
    address: str = networks[f"{stack.project}_{network}"]["IPAddress"]
    return address


def _stranger(stack: Stack, network: str, script: str, *arguments: str) -> str:
    """What a container prints that is not Compose's own but is on one of its networks."""
    run = ("run", "--rm", "--network", f"{stack.project}_{network}", "--entrypoint", "python", "greenroom-light:test")
    return docker(*run, "-c", script, *arguments)


def test_a_stranger_at_the_front_reaches_the_gateway_alone(stack: Stack) -> None:
    door = f"{_address(stack, 'gateway', 'front')}:8000"
    (kafka, worker, predictor) = (_address(stack, name) for name in ("kafka", "worker", "predictor"))
    behind = [f"{kafka}:9092", f"{worker}:7000", f"{worker}:8080", f"{predictor}:7000", "kafka:9092", "worker:7000"]
    said = _stranger(stack, "front", REACH, door, *behind).splitlines()
    assert said == [f"{door} open", *(f"{address} shut" for address in behind)]
    assert _stranger(stack, "back", REACH, *behind).splitlines() == [f"{address} open" for address in behind]


def test_a_peer_without_a_certificate_is_refused(stack: Stack) -> None:
    worker = f"{_address(stack, 'worker')}:7000"
    assert _stranger(stack, "back", CALL, worker, "in the clear") == "UNAVAILABLE"
    assert (
        _stranger(stack, "front", CALL, f"{_address(stack, 'gateway', 'front')}:7000", "in the clear") == "UNAVAILABLE"
    )

    def says(service: str, how: str) -> str:
        return docker("exec", stack.containers(service)[0], "python", "-c", CALL, worker, how)

    assert says("scheduler", "with my certificate") not in ("UNAVAILABLE", "UNAUTHENTICATED")
    assert says("scheduler", "by TLS alone") == "UNAVAILABLE"
    assert says("gateway", "with my certificate") == "UNAVAILABLE", "a gateway is called and calls no worker"


def test_a_peer_without_a_password_reads_no_topic(stack: Stack) -> None:
    assert _stranger(stack, "back", READ) == "refused"
    kafka = f"{_address(stack, 'kafka')}"
    shut = [f"{kafka}:9093 shut", f"{kafka}:9094 shut"]
    assert _stranger(stack, "back", REACH, f"{kafka}:9093", f"{kafka}:9094").splitlines() == shut


def test_what_was_made_at_the_first_start_stays(stack: Stack) -> None:
    assert stack.compose("run", "--rm", "--no-TTY", "certificates") == "all certificates are there"
    (worker,) = stack.containers("worker")
    assert docker("exec", worker, "sh", "-c", "ls /run/greenroom").split() == [
        "ca.pem", "certificate.pem", "kafka-password", "key.pem",
    ]  # fmt: skip


def test_both_doors_give_the_same_answer(stack: Stack) -> None:
    said = "Hello! I am Leo."
    with stack.http() as client:
        answer = client.chat.completions.create(
            model="greenroom-understudy", messages=[{"role": "user", "content": said}], temperature=0, max_tokens=40
        )
    with stack.grpc() as client_:
        same = client_.generate(messages=[{"role": "user", "content": said}], temperature=0, max_tokens=40)
    assert answer.choices[0].message.content
    assert same.text == answer.choices[0].message.content


def test_a_worker_dies_under_its_streams(stack: Stack, undisturbed: dict[Question, str]) -> None:
    (worker,) = stack.containers("worker")
    with reading_all(stack, QUESTIONS) as readings:
        stack.crash(worker)
        assert any(reading.under_way for reading in readings), "all had ended before the worker died"
    check_whole(readings, undisturbed)
    stack.wait_healthy(worker)


def test_the_broker_dies_under_its_streams(stack: Stack, undisturbed: dict[Question, str]) -> None:
    (kafka,) = stack.containers("kafka")
    with reading_all(stack, QUESTIONS) as readings:
        stack.crash(kafka)
        assert any(reading.under_way for reading in readings), "all had ended before the broker died"
    check_whole(readings, undisturbed)
    stack.wait_healthy(kafka)


def test_one_of_two_workers_dies_under_its_streams(stack: Stack, undisturbed: dict[Question, str]) -> None:
    stack.up("--no-recreate", "--scale", "worker=2")
    workers = stack.containers("worker")
    assert len(workers) == 2
    until_others(
        lambda: _value(stack, "max(greenroom_scheduler_workers)") == 2, "both workers have a lease", within_s=120
    )
    with reading_all(stack, QUESTIONS) as readings:
        busiest = max(workers, key=lambda worker: _running(worker))
        assert _running(busiest) > 0
        stack.crash(busiest)
        assert any(reading.under_way for reading in readings), "all had ended before the worker died"
    check_whole(readings, undisturbed)


def _running(worker: str) -> float:
    """Requests in its batch, as it says itself."""
    ask = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/metrics', timeout=10).read().decode())"
    found = re.search(
        r"^greenroom_batch_requests_running (\S+)$", docker("exec", worker, "python", "-c", ask), re.MULTILINE
    )
    assert found
    return float(found[1])


def test_the_active_scheduler_dies_under_its_streams(stack: Stack, undisturbed: dict[Question, str]) -> None:
    schedulers = stack.containers("scheduler")
    assert len(schedulers) == 2
    with reading_all(stack, QUESTIONS) as readings:
        for scheduler in schedulers:
            stack.crash(scheduler)
        assert any(reading.under_way for reading in readings), "all had ended before both schedulers had died"
    check_whole(readings, undisturbed)


def _value(stack: Stack, query: str) -> float | None:
    found = stack.prometheus(f"query?query={urllib.parse.quote(query)}")["result"]
    return float(found[0]["value"][1]) if found else None


def test_prometheus_sees_all_of_it(stack: Stack) -> None:
    def all_up() -> bool:
        targets = stack.prometheus("targets?state=active")["activeTargets"]
        up = sorted(target["labels"]["job"] for target in targets if target["health"] == "up")
        return up == ["gateway", "predictor", "scheduler", "scheduler", "tasktype", "worker", "worker"]

    until_others(all_up, "all targets are up", within_s=120)
    rules = [rule for group in stack.prometheus("rules")["groups"] for rule in group["rules"]]
    assert rules
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}


def test_every_panel_of_the_dashboard_is_answered(stack: Stack) -> None:
    """The panel of troubles is left out: there may have been none since the processes last started."""
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "greenroom.json").read_text())
    until_others(
        lambda: _value(stack, "sum(greenroom_scheduler_active)") == 1, "a scheduler has taken over", within_s=120
    )
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            query = target["expr"].replace("$__rate_interval", "5m").replace("$worker", ".*")
            result = stack.prometheus(f"query?query={urllib.parse.quote(query)}")["result"]
            assert result or panel["title"] == "Troubles", f"{panel['title']}: nothing for {query}"


def test_promtool_has_nothing_to_say(stack: Stack) -> None:
    image = services()["prometheus"]["image"]
    mounted = f"{ROOT / 'deploy' / 'prometheus'}:/etc/prometheus:ro"
    run = ("run", "--rm", "--network", "none", "--volume", mounted, "--entrypoint", "promtool", image)
    assert "SUCCESS" in docker(*run, "check", "config", "/etc/prometheus/prometheus.yml")
    assert "SUCCESS" in docker(*run, "test", "rules", "/etc/prometheus/tests.yml")


def test_a_key_that_is_revoked_is_refused(stack: Stack) -> None:
    other = stack.compose("run", "--rm", "--no-TTY", "--no-deps", "keys", "add", "other")
    stack.compose("run", "--rm", "--no-TTY", "--no-deps", "keys", "revoke", "other")

    def refused() -> bool:
        asked = urllib.request.Request(f"http://127.0.0.1:{stack.http_port}/v1/models")
        asked.add_header("Authorization", f"Bearer {other}")
        try:
            urllib.request.urlopen(asked, timeout=30).close()
        except urllib.error.HTTPError as error:
            with error:
                return error.code == 401
        return False

    until_others(refused, "the revoked key is refused", within_s=10)


def test_it_stops_as_it_should(stack: Stack) -> None:
    """SIGTERM: every service of ours drains and ends with 0, well before Docker would kill it."""
    ours = [
        container
        for service in ("gateway", "tasktype", "scheduler", "predictor", "worker")
        for container in stack.containers(service)
    ]
    stack.compose("stop", timeout_s=180)
    for container in ours:
        found = stack.inspect(container)
        assert found["State"]["ExitCode"] == 0, f"{found['Name']}\n{docker('logs', '--tail', '30', container)}"
