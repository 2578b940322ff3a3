"""A real Apache Kafka broker on loopback: from its jars by Java and Maven, else in a container."""

from __future__ import annotations

import atexit
import base64
import functools
import itertools
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from string import Template

from tests import reaper
from tests.kafka.jars import DEPLOY, jars, kafka_version
from tests.kafka.probe import answers
from tests.pausing import pause

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
USER = "alice"
PASSWORD = "alice-has-a-secret"
_STORE_PASSWORD = "of-the-key-store"
_MISSING = (
    "there is no way to start a Kafka broker here, which these tests need: install Java 17 or later and Maven "
    "(Debian: apt-get install openjdk-17-jdk-headless maven; macOS: brew install openjdk maven), or Docker"
)


class Broker:
    """One node that keeps its data over ``stop``, ``kill`` and ``start``. Two listeners: plain, and TLS with USER and
    PASSWORD by PLAIN or SCRAM-SHA-256, whose certificate is ``certificate``."""

    def __init__(self, folder: Path, port: int | None = None, *, bind: str = "127.0.0.1") -> None:
        self.folder = folder
        self.port = port or free_port()
        self.secure_port = free_port()
        self.certificate = folder / "broker.pem"
        folder.mkdir(parents=True, exist_ok=True)
        self._properties = folder / "server.properties"
        self._properties.write_text(
            Template((DEPLOY / "server.properties").read_text()).substitute(
                bind=bind,
                port=self.port,
                secure_port=self.secure_port,
                controller_port=free_port(),
                data=folder / "data",
                keystore=folder / "broker.p12",
                store_password=_STORE_PASSWORD,
                user=USER,
                password=PASSWORD,
            )
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def secure_address(self) -> str:
        return f"127.0.0.1:{self.secure_port}"

    def start(self) -> None:
        """Returns when a metadata call is answered."""
        raise NotImplementedError

    def stop(self) -> None:
        """In order, as SIGTERM does."""
        raise NotImplementedError

    def kill(self) -> None:
        raise NotImplementedError

    def pause(self) -> None:
        """It answers nothing until ``resume``; its connections stay."""
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def revive(self) -> None:
        """Start it where it does not run, resume it where it is paused."""
        raise NotImplementedError

    def wait_end(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Until it has ended of itself, as it does where its disk fails."""
        raise NotImplementedError

    def remove(self) -> None:
        """Kill it and delete its data."""
        raise NotImplementedError

    def _format(self) -> list[str]:
        """Arguments of Kafka's StorageTool."""
        cluster = "k" + base64.urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]
        scram = f"SCRAM-SHA-256=[name={USER},password={PASSWORD}]"
        return ["format", "--standalone", "-t", cluster, "-c", str(self._properties), "--add-scram", scram]

    def _claim(self) -> None:
        """Raises AssertionError where another process has a port of ours: its answers would be taken for ours."""
        for port in (self.port, self.secure_port):
            if not _is_free(port):
                raise AssertionError(
                    f"port {port} of 127.0.0.1 is taken: another process listens there, maybe a broker"
                )

    def _wait(self, ended: Callable[[], str | None]) -> None:
        """Until it answers. ``ended``: why it has ended, None while it runs."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers("127.0.0.1", self.port):
            if (reason := ended()) is not None:
                raise AssertionError(f"the Kafka broker ended before it was ready:\n{reason}")
            if time.monotonic() > deadline:
                raise AssertionError(f"the Kafka broker does not answer after {START_TIMEOUT_S:g} s; see {self.folder}")
            time.sleep(0.05)


class JarBroker(Broker):
    """A Java process on the jars of deploy/kafka/pom.xml."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        super().__init__(folder, port)
        self._jars = jars()
        self._process: subprocess.Popen[bytes] | None = None
        _make_certificate(folder)
        _run(self._java("kafka.tools.StorageTool", *self._format()))

    def _java(self, *arguments: str) -> list[str]:
        return [
            "java", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
            f"-Dlog4j2.configurationFile={DEPLOY / 'log4j2.properties'}", "-cp", f"{self._jars}/*", *arguments,
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        assert self._process is not None, "the broker does not run"
        return self._process.pid

    def start(self) -> None:
        self._claim()
        with (self.folder / "log").open("ab") as log:
            process = self._process = subprocess.Popen(
                self._java("kafka.Kafka", str(self._properties)),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        def ended() -> str | None:
            return None if process.poll() is None else (self.folder / "log").read_text(errors="replace")[-4000:]

        self._wait(ended)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        if self._process is not None:
            pause(self._process.pid)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def revive(self) -> None:
        if self._process is None or self._process.poll() is not None:
            self.start()
        self.resume()

    def wait_end(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        if self._process is not None:
            self._process.wait(timeout_s)
            self._process = None

    def remove(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGCONT)
        process.send_signal(how)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_TIMEOUT_S)


class ContainerBroker(Broker):
    """The published image, with the same settings. Its data is in the container, which stays until ``remove``."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        super().__init__(folder, port, bind="0.0.0.0")
        image = f"apache/kafka:{kafka_version()}"
        self._name = f"greenroom-kafka-{uuid.uuid4().hex[:12]}"
        reaper.stop_afterwards(self._name)
        inside = "/mnt/broker"
        text = self._properties.read_text().replace(str(folder), inside)
        self._properties.write_text(text.replace(f"{inside}/data", "/tmp/data"))
        mount = ["--volume", f"{folder}:{inside}"]
        folder.chmod(0o755)  # the image's user is another one
        shutil.copy(DEPLOY / "log4j2.properties", folder)
        make = [" ".join(_keytool(Path(inside), genkey=genkey)) for genkey in (True, False)]
        keys = " && ".join([*make, f"chmod a+r {inside}/*"])
        _run(["docker", "run", "--rm", *mount, "--user", "0", "--entrypoint", "sh", image, "-c", keys])
        java = f"java $KAFKA_HEAP_OPTS -Dlog4j2.configurationFile={inside}/log4j2.properties -cp '/opt/kafka/libs/*'"
        tool = " ".join(f"'{word}'" for word in self._format()).replace(str(folder), inside)
        once = f"[ -e /tmp/data ] || {java} kafka.tools.StorageTool {tool}"
        start = f"{once}; exec {java} kafka.Kafka {inside}/server.properties"
        ports = [f"--publish=127.0.0.1:{number}:{number}" for number in (self.port, self.secure_port)]
        _run(["docker", "create", "--name", self._name, *mount, *ports, "--env", "KAFKA_HEAP_OPTS=-Xmx512m",
              "--entrypoint", "sh", image, "-c", start])  # fmt: skip

    def start(self) -> None:
        self._claim()
        _run(["docker", "start", self._name])

        def ended() -> str | None:
            if _run(["docker", "inspect", "--format", "{{.State.Running}}", self._name]).strip() == "true":
                return None
            return _run(["docker", "logs", "--tail", "50", self._name])

        self._wait(ended)

    def stop(self) -> None:
        _run(["docker", "stop", self._name])

    def kill(self) -> None:
        subprocess.run(["docker", "kill", self._name], capture_output=True, timeout=STOP_TIMEOUT_S, check=False)

    def pause(self) -> None:
        _run(["docker", "pause", self._name])

    def resume(self) -> None:
        _run(["docker", "unpause", self._name])

    def revive(self) -> None:
        state = _run(["docker", "inspect", "--format", "{{.State.Status}}", self._name]).strip()
        if state == "paused":
            self.resume()
        elif state != "running":
            self.start()

    def wait_end(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        command = ["docker", "wait", self._name]
        subprocess.run(command, capture_output=True, timeout=timeout_s, check=True)

    def remove(self) -> None:
        command = ["docker", "rm", "--force", self._name]
        subprocess.run(command, capture_output=True, timeout=STOP_TIMEOUT_S, check=False)
        shutil.rmtree(self.folder, ignore_errors=True)


def make_broker(folder: Path, port: int | None = None) -> Broker:
    """Not started yet. Raises AssertionError, which says what to install, where there is no way to."""
    if shutil.which("java") and shutil.which("mvn"):
        return JarBroker(folder, port)
    if shutil.which("docker"):
        return ContainerBroker(folder, port)
    raise AssertionError(_MISSING)


@functools.cache
def shared_broker() -> Broker:
    """The one of this process, started at its first use and removed at its end."""
    folder = Path(tempfile.mkdtemp(prefix="greenroom-kafka-"))
    reaper.remove_afterwards(folder)
    broker = make_broker(folder)
    atexit.register(broker.remove)
    broker.start()
    return broker


def free_port() -> int:
    """A port below those that connections go out from: a client that calls a broker which is away would otherwise
    sooner or later be given the broker's port as its own, and keep it."""
    for port in itertools.islice(_ports, _PORTS):
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError("no port between 20000 and 30000 is free")


def _is_free(port: int) -> bool:
    """Whether a server can listen there; connections that are just ending do not hinder one."""
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


_PORTS = 1250


def _own_ports() -> Iterator[int]:
    """Over and over, from a random one on: a port that was given away is soon listened on, but not yet. Each of the
    processes that run tests at once has its own."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    first = random.randrange(_PORTS)
    for number in itertools.count(first):
        yield 20_000 + process * _PORTS + number % _PORTS


_ports = _own_ports()


def _keytool(folder: Path, *, genkey: bool) -> list[str]:
    store = ["-keystore", str(folder / "broker.p12"), "-storepass", _STORE_PASSWORD, "-alias", "broker"]
    if genkey:
        return ["keytool", "-genkeypair", "-keyalg", "EC", "-groupname", "secp256r1", "-dname", "CN=localhost",
                "-validity", "3650", "-ext", "SAN=dns:localhost,ip:127.0.0.1", "-ext", "bc=ca:true",
                "-storetype", "PKCS12", *store]  # fmt: skip
    return ["keytool", "-exportcert", "-rfc", "-file", str(folder / "broker.pem"), *store]


def _make_certificate(folder: Path) -> None:
    _run(_keytool(folder, genkey=True))
    _run(_keytool(folder, genkey=False))


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command[:3])} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr
