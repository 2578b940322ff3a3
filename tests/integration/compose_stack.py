"""compose.yaml as it is, brought up under a name and on ports of its own, and taken down with all it made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai

from greenroom.client import Client
from tests.kafka.broker import free_port
from tests.waiting import until_others

ROOT = Path(__file__).parents[2]
UP_S = 900.0
STREAM_S = 300.0
INSTALL = (
    "`make test-compose` needs a running Docker engine with Compose v2.24 or later: https://docs.docker.com/engine/"
)


def docker(*arguments: str, timeout_s: float = 120.0) -> str:
    """What it prints. Raises AssertionError with all of it where it fails."""
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()


def engine_answers() -> bool:
    try:
        commands = (["docker", "info"], ["docker", "compose", "version"])
        return all(
            subprocess.run(each, capture_output=True, timeout=60, check=False).returncode == 0 for each in commands
        )
    except FileNotFoundError:
        return False


class Stack:
    """One project of Compose's. ``key`` is made by the user's own command."""

    def __init__(self, *profiles: str) -> None:
        self.project = f"greenroom-test-{uuid.uuid4().hex[:8]}"
        self.http_port, self.grpc_port, self.prometheus_port = free_port(), free_port(), free_port()
        self._profiles = [word for profile in profiles for word in ("--profile", profile)]
        self._environment = {
            **os.environ,
            "GREENROOM_TAG": "test",
            "GREENROOM_DTYPE": "float32",
            "GREENROOM_HTTP_PORT": str(self.http_port),
            "GREENROOM_GRPC_PORT": str(self.grpc_port),
            "PROMETHEUS_PORT": str(self.prometheus_port),
        }
        self.key = ""

    def compose(self, *arguments: str, timeout_s: float = 120.0) -> str:
        """As ``docker`` has it."""
        command = ["docker", "compose", "--project-name", self.project, *self._profiles, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode:
            raise AssertionError(f"{' '.join(arguments)}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}\n{self.logs()}")
        return done.stdout.strip()

    def build(self) -> None:
        """Shows its progress: it takes minutes where nothing is cached."""
        command = ["docker", "compose", "--project-name", self.project, *self._profiles, "build"]
        subprocess.run(command, cwd=ROOT, env=self._environment, stdout=sys.stderr, timeout=3600, check=True)

    def up(self, *arguments: str) -> None:
        """Returns once every container is healthy."""
        self.compose(
            "up", "--detach", "--no-build", "--wait", "--wait-timeout", str(int(UP_S)), *arguments, timeout_s=UP_S
        )

    def down(self) -> None:
        self.compose("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout_s=300)

    def left_over(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return [
            line
            for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"])
            for line in docker(*kind, "--quiet", "--filter", label).split()
        ]

    def logs(self, tail: int = 40) -> str:
        command = ["docker", "compose", "--project-name", self.project, *self._profiles, "logs", "--tail", str(tail)]
        done = subprocess.run(
            command, cwd=ROOT, env=self._environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout[-20000:]

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(docker("inspect", container))[0]
        return found

    def crash(self, container: str) -> None:
        """SIGKILL to everything in it but its init, as an out-of-memory killer does; Docker starts it again."""
        restarts = self.inspect(container)["RestartCount"]
        docker("exec", container, "sh", "-c", "kill -9 -1")
        until_others(lambda: self.inspect(container)["RestartCount"] > restarts, f"{container[:12]} started again")

    def wait_healthy(self, container: str, timeout_s: float = 180.0) -> None:
        def healthy() -> bool:
            state = self.inspect(container)["State"]
            return bool(state["Running"] and state["Health"]["Status"] == "healthy")

        until_others(healthy, f"{container[:12]} healthy", within_s=timeout_s)

    # -- clients -------------------------------------------------------------------------------------------------

    def http(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"http://127.0.0.1:{self.http_port}/v1", api_key=self.key, timeout=STREAM_S, max_retries=4
        )

    def grpc(self) -> Client:
        return Client(f"127.0.0.1:{self.grpc_port}", api_key=self.key, timeout_s=STREAM_S)

    def prometheus(self, path: str) -> Any:
        """The data of an answer of its API."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.prometheus_port}/api/v1/{path}", timeout=30) as reply:
            answer = json.loads(reply.read())
        assert answer["status"] == "success", answer
        return answer["data"]


@dataclass(frozen=True)
class Question:
    """Sampled at temperature 1 with ``seed``, so that the same question has the same answer."""

    prompt: str
    tokens: int
    seed: int


@dataclass
class Reading:
    """One stream while it is read, in a thread of its own."""

    question: Question
    parts: list[str] = field(default_factory=list)
    reason: str | None = None
    failure: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def under_way(self) -> bool:
        return bool(self.parts) and not self.ended.is_set()


def read_http(stack: Stack, reading: Reading) -> None:
    question = reading.question
    model = "greenroom-understudy"
    with stack.http() as client:
        stream = client.completions.create(
            model=model, prompt=question.prompt, max_tokens=question.tokens, temperature=1.0,
            seed=question.seed, stream=True, extra_body={"ignore_eos": True},
        )  # fmt: skip
        for part in stream:
            for choice in part.choices:
                reading.parts.append(choice.text)
                reading.reason = choice.finish_reason or reading.reason


def read_grpc(stack: Stack, reading: Reading) -> None:
    question = reading.question
    with stack.grpc() as client:
        stream = client.stream(
            question.prompt, max_tokens=question.tokens, temperature=1.0, seed=question.seed, ignore_eos=True
        )
        for part in stream:
            reading.parts.append(part.text)
            reading.reason = part.reason.value if part.reason else reading.reason


@contextmanager
def reading_all(stack: Stack, questions: list[Question]) -> Iterator[list[Reading]]:
    """One stream a question, over HTTP and gRPC in turn; all have begun when this is entered, and ended at its end."""
    readings = [Reading(question) for question in questions]

    def read(number: int) -> None:
        try:
            (read_http, read_grpc)[number % 2](stack, readings[number])
        except BaseException as error:
            readings[number].failure = error
        finally:
            readings[number].ended.set()

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(questions))]
    for thread in threads:
        thread.start()
    try:
        until_others(
            lambda: all(each.parts or each.ended.is_set() for each in readings),
            "every stream has begun",
            within_s=STREAM_S,
        )
        yield readings
    finally:
        deadline = time.monotonic() + STREAM_S
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), f"streams without an end:\n{stack.logs()}"
    for reading in readings:
        if reading.failure is not None:
            raise AssertionError(f"a stream broke after {reading.text[:200]!r}:\n{stack.logs()}") from reading.failure
