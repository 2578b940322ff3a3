"""How a Kafka cluster is reached."""

from __future__ import annotations

import math
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from greenroom.core.errors import InvalidConfig

SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_BROKER = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^:\s,/]+):(\d{1,5})")
_PREFIX = re.compile(r"[A-Za-z0-9._-]{0,100}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """A Kafka cluster. Raises InvalidConfig, naming the field.

    ``brokers``: host:port of some of its brokers; the rest is found from them. ``prefix``: before every topic's and
    group's name. ``tls``: use TLS; any of the three files implies it. ``ca_file``: the authority that signed the
    brokers' certificates (PEM; None: those that the system trusts). ``cert_file``, ``key_file``: this client's own.
    ``sasl_mechanism``: PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512, with ``sasl_user`` and a password, given itself or in a
    file. ``replication``: replicas of topics that are created; None: 3, or as many as there are brokers.
    ``connect_timeout_s``: how long a start waits for the cluster; ``request_timeout_s``: for one answer.
    ``session_timeout_s``: after how long of silence a group's member counts as dead; brokers allow 6 s or more.
    ``heartbeat_s``: how often a member sends a heartbeat, and about how long a rebalance takes.
    """

    brokers: tuple[str, ...]
    prefix: str = "greenroom."
    client_id: str = "greenroom"
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    sasl_mechanism: str | None = None
    sasl_user: str = ""
    sasl_password: str = field(default="", repr=False)
    sasl_password_file: Path | None = None
    replication: int | None = None
    connect_timeout_s: float = 60.0
    request_timeout_s: float = 10.0
    session_timeout_s: float = 10.0
    heartbeat_s: float = 0.5

    def __post_init__(self) -> None:
        if not self.brokers:
            raise InvalidConfig("brokers", self.brokers, "name at least one as host:port")
        for broker in self.brokers:
            match = _BROKER.fullmatch(broker)
            if match is None or not 0 < int(match[2]) < 65536:
                raise InvalidConfig("brokers", broker, "write host:port, such as kafka:9092 or [::1]:9092")
        if not _PREFIX.fullmatch(self.prefix):
            raise InvalidConfig("prefix", self.prefix, "it takes at most 100 of: letters, digits, dot, _ and -")
        self._check_tls()
        self._check_sasl()
        if self.replication is not None and self.replication < 1:
            raise InvalidConfig("replication", self.replication, "it is a number from 1")
        for name in ("connect_timeout_s", "request_timeout_s", "session_timeout_s", "heartbeat_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise InvalidConfig(name, getattr(self, name), "it is a number of seconds above 0")
        if self.heartbeat_s > self.session_timeout_s / 3:
            allowed = f"it is at most a third of session_timeout_s ({self.session_timeout_s:g})"
            raise InvalidConfig("heartbeat_s", self.heartbeat_s, allowed)

    def _check_tls(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            missing = "cert_file" if self.cert_file is None else "key_file"
            raise InvalidConfig(missing, None, "cert_file and key_file go together")

    def _check_sasl(self) -> None:
        if self.sasl_mechanism is None:
            for name in ("sasl_user", "sasl_password", "sasl_password_file"):
                if getattr(self, name):
                    raise InvalidConfig("sasl_mechanism", None, f"{name} is given: name {' or '.join(SASL_MECHANISMS)}")
            return
        if self.sasl_mechanism not in SASL_MECHANISMS:
            raise InvalidConfig("sasl_mechanism", self.sasl_mechanism, f"known: {', '.join(SASL_MECHANISMS)}")
        if not self.sasl_user:
            raise InvalidConfig("sasl_user", self.sasl_user, f"{self.sasl_mechanism} needs a user")
        if bool(self.sasl_password) == (self.sasl_password_file is not None):
            raise InvalidConfig("sasl_password", "...", "give it, or a file that has it: one of the two")

    @property
    def encrypted(self) -> bool:
        return self.tls or self.ca_file is not None or self.cert_file is not None

    @property
    def protocol(self) -> str:
        """Kafka's name for the combination."""
        transport = "SSL" if self.encrypted else "PLAINTEXT"
        return transport if self.sasl_mechanism is None else f"SASL_{transport}"

    def password(self) -> str:
        """Reads the file, where the password is in one. Raises InvalidConfig."""
        if self.sasl_password_file is None:
            return self.sasl_password
        path = str(self.sasl_password_file)
        try:
            password = self.sasl_password_file.read_text().strip("\r\n")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig("sasl_password_file", path, f"it can not be read: {error}") from error
        if not password:
            raise InvalidConfig("sasl_password_file", path, "it is empty: write the password into it")
        return password

    def ssl_context(self) -> ssl.SSLContext | None:
        """Reads the files; None without TLS. Raises InvalidConfig."""
        if not self.encrypted:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidConfig("ca_file", str(self.ca_file), f"it is no PEM file of certificates: {error}") from error
        if self.cert_file is not None:
            try:
                context.load_cert_chain(self.cert_file, self.key_file)
            except (OSError, ssl.SSLError) as error:
                allowed = f"with key_file {str(self.key_file)!r} it is no PEM pair: {error}"
                raise InvalidConfig("cert_file", str(self.cert_file), allowed) from error
        return context
