"""The whole pipeline as processes on loopback, each of which can be killed, paused and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.image import certificates
from tests.kafka.broker import PASSWORD, USER, Broker, free_port
from tests.pausing import pause
from tests.waiting import DEADLINE_S

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 60.0
_SHOWN_LINES = 120
"""Of a log, from its first defect on."""
SESSION_S = 4.0
"""After so long of silence others take over a process's partitions: no test has to wait for the usual 10 s."""


class Process:
    """One service. ``restarts`` counts how often it was started again; its log goes on in one file."""

    def __init__(
        self, name: str, arguments: Sequence[str], *, health: str, folder: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.arguments = list(arguments)
        self.health = health
        self.log_path = folder / f"{name}.log"
        self.restarts = -1
        self._environment = {**os.environ, **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, **environment: str) -> None:
        """``environment``: for this start only."""
        assert self._process is None or self._process.poll() is not None, f"{self.name} runs"
        self.restarts += 1
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "greenroom", *self.arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def listens(self) -> str:
        """host:port of its gRPC server for the other services."""
        return self.arguments[self.arguments.index("--listen") + 1]

    def metrics(self, accept: str = "text/plain") -> str:
        request = urllib.request.Request(self.health.replace("/health", "/metrics"), headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return str(response.read().decode())

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name that carry ``labels``."""
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.metrics())
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.health, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        ready = False
        while not ready:
            ready = self.ready  # another process may answer there, so it is looked whether this one lives
            assert self._process is not None
            assert self._process.poll() is None, (
                f"{self.name} ended with {self._process.returncode}:\n{self.log()[-4000:]}"
            )
            assert time.monotonic() < deadline, f"{self.name} is not ready after {timeout_s} s:\n{self.log()[-4000:]}"
            if not ready:
                time.sleep(0.05)  # between two questions over HTTP; nothing tells when the answer changes

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    def wait_end(self, timeout_s: float = STOP_TIMEOUT_S) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def terminate(self) -> int:
        """SIGTERM; its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_TIMEOUT_S)

    def pause(self) -> None:
        pause(self.pid)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)


@dataclass(frozen=True)
class Security:
    """Mutual TLS between the services, and TLS and a password to ``broker``, as in compose.yaml: each service has its
    own certificate, made into ``folder`` by the same program."""

    broker: Broker
    folder: Path

    def __post_init__(self) -> None:
        certificates.make(self.folder)
        (self.folder / "password").write_text(PASSWORD)

    def identity(self, kind: str) -> Path:
        """The folder of a kind of service."""
        return self.folder / "identities" / kind

    def environment(self, kind: str) -> dict[str, str]:
        kafka = {
            "GREENROOM_KAFKA_CA": self.broker.certificate,
            "GREENROOM_KAFKA_SASL": "SCRAM-SHA-256",
            "GREENROOM_KAFKA_USER": USER,
            "GREENROOM_KAFKA_PASSWORD_FILE": self.folder / "password",
        }
        rpc = {
            "GREENROOM_RPC_CA": self.identity(kind) / "ca.pem",
            "GREENROOM_RPC_CERT": self.identity(kind) / "certificate.pem",
            "GREENROOM_RPC_KEY": self.identity(kind) / "key.pem",
            "GREENROOM_RPC_NAME": certificates.NAME,
        }
        return {name: str(value) for name, value in {**kafka, **(rpc if kind != "tasktype" else {})}.items()}


class Cluster:
    """All processes of a pipeline on the broker at ``brokers``, started together."""

    def __init__(
        self,
        folder: Path,
        brokers: str,
        *,
        prefix: str,
        cache: Path,
        gateways: int = 1,
        tasktypes: int = 1,
        schedulers: int = 1,
        predictors: int = 1,
        workers: int = 1,
        options: Mapping[str, Sequence[str]] | None = None,
        environment: Mapping[str, str] | None = None,
        security: Security | None = None,
    ) -> None:
        """``options``: more of the command line, by kind of service. ``security``: ``brokers`` is its broker's secure
        address."""
        self.folder = folder
        self.brokers = brokers
        self.prefix = prefix
        self.processes: dict[str, Process] = {}
        self.urls: list[str] = []
        self.grpc_addresses: list[str] = []
        self._options = options or {}
        self._security = security
        self._common = ["--brokers", brokers, "--topic-prefix", prefix]
        self._environment = {
            "GREENROOM_CACHE": str(cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "GREENROOM_KAFKA_SESSION_TIMEOUT": str(SESSION_S),
            **(environment or {}),
        }
        for number in range(gateways):
            self._gateway(f"gateway{number}")
        for kind, count in (("tasktype", tasktypes), ("scheduler", schedulers), ("predictor", predictors)):
            for number in range(count):
                self._add(kind, f"{kind}{number}", listens=kind == "predictor")
        for number in range(workers):
            self._add("worker", f"worker{number}", listens=True)

    def _gateway(self, name: str) -> None:
        http, grpc = free_port(), free_port()
        self.urls.append(f"http://127.0.0.1:{http}")
        self.grpc_addresses.append(f"127.0.0.1:{grpc}")
        arguments = ["gateway", *self._common, "--port", str(http), "--grpc-port", str(grpc)]
        arguments += ["--listen", f"127.0.0.1:{free_port()}", *self._options.get("gateway", ())]
        self._make(name, arguments, f"{self.urls[-1]}/health")

    def _add(self, kind: str, name: str, *, listens: bool) -> None:
        probes = free_port()
        arguments = [kind, *self._common, "--probe-port", str(probes)]
        if listens:
            arguments += ["--listen", f"127.0.0.1:{free_port()}"]
        if kind == "worker":
            arguments += ["--threads", "1"]
        if kind == "predictor":
            arguments += ["--state-dir", str(self.folder / name)]
        arguments += self._options.get(kind, ())
        self._make(name, arguments, f"http://127.0.0.1:{probes}/health")

    def _make(self, name: str, arguments: Sequence[str], health: str) -> None:
        environment = {**self._environment, **(self._security.environment(arguments[0]) if self._security else {})}
        self.processes[name] = Process(name, arguments, health=health, folder=self.folder, environment=environment)

    def __getitem__(self, name: str) -> Process:
        return self.processes[name]

    def start(self) -> None:
        """All of them; workers first, which take longest and make the expert pack."""
        for process in sorted(self.processes.values(), key=lambda process: not process.name.startswith("worker")):
            process.start()
        for process in self.processes.values():
            process.wait_ready()

    def close(self) -> None:
        for process in self.processes.values():
            if process.running:
                process.resume()
            process.kill()

    def check_logs(self) -> None:
        """Fails on unforeseen exceptions and on tasks that were not awaited, and shows what the log says of them."""
        signs = ("Traceback", "never retrieved", "destroyed but it is pending", "by a defect", "never awaited")
        found = []
        for process in self.processes.values():
            lines = process.log().splitlines()
            first = next((at for at, line in enumerate(lines) if any(sign in line for sign in signs)), None)
            if first is not None:
                found.append("\n".join([f"== {process.name}", *lines[first : first + _SHOWN_LINES]]))
        assert not found, "\n".join(found)

    def logs(self, last: int = 3000) -> str:
        return "\n".join(f"== {process.name}\n{process.log()[-last:]}" for process in self.processes.values())


@contextmanager
def running(cluster: Cluster) -> Iterator[Cluster]:
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
