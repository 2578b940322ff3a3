"""The options that all processes of the pipeline share, and what is made of them."""

from __future__ import annotations

import errno
import importlib
import os
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.numbers import NumberRange
from greenroom.cli.option_stack import stack
from greenroom.core.errors import InvalidConfig
from greenroom.core.hosts import is_loopback

if TYPE_CHECKING:
    from greenroom.fabric.log.config import LogConfig
    from greenroom.fabric.log.kafka.kafka_log import KafkaLog
    from greenroom.fabric.rpc import GrpcDialer, NetworkEndpoint, ServerConfig
    from greenroom.fabric.telemetry import TelemetryConfig


_file = click.Path(exists=True, dir_okay=False, path_type=Path)


log_options = stack(
    click.option(
        "--brokers",
        default="127.0.0.1:9092",
        show_default=True,
        envvar="GREENROOM_BROKERS",
        help="Kafka brokers as host:port, separated by commas.",
    ),
    click.option(
        "--topic-prefix",
        default="greenroom.",
        show_default=True,
        envvar="GREENROOM_TOPIC_PREFIX",
        help="Put before the name of every topic and group.",
    ),
    click.option(
        "--pools",
        type=int,
        default=1,
        show_default=True,
        envvar="GREENROOM_POOLS",
        help="Pools (models) on this log; topics are created for so many.",
    ),
    click.option("--kafka-tls", is_flag=True, envvar="GREENROOM_KAFKA_TLS", help="Talk TLS to the brokers."),
    click.option("--kafka-ca", type=_file, envvar="GREENROOM_KAFKA_CA", help="Who signed the brokers' certificates."),
    click.option("--kafka-cert", type=_file, envvar="GREENROOM_KAFKA_CERT", help="Our own certificate."),
    click.option("--kafka-key", type=_file, envvar="GREENROOM_KAFKA_KEY", help="Its key."),
    click.option(
        "--kafka-sasl", envvar="GREENROOM_KAFKA_SASL", help="PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.  [default: none]"
    ),
    click.option("--kafka-user", default="", envvar="GREENROOM_KAFKA_USER", help="The SASL user."),
    click.option(
        "--kafka-password-file", type=_file, envvar="GREENROOM_KAFKA_PASSWORD_FILE", help="The file with its password."
    ),
    click.option(
        "--kafka-session-timeout",
        type=NumberRange(min=1.5),
        default=10.0,
        show_default=True,
        envvar="GREENROOM_KAFKA_SESSION_TIMEOUT",
        help="Seconds of silence after which another takes over a process's partitions; brokers allow 6 and more.",
    ),
)

telemetry_options = stack(
    click.option(
        "--instance",
        envvar="GREENROOM_INSTANCE",
        help="What this process is called; a number is added, since a restart is another instance.  "
        "[default: host and kind]",
    ),
    click.option(
        "--log-format",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        envvar="GREENROOM_LOG_FORMAT",
        help="Lines for people, or one JSON object a line.",
    ),
    click.option("--otlp-endpoint", envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Where traces go.  [default: nowhere]"),
)

drain_option = click.option(
    "--drain-timeout", type=float, default=30.0, show_default=True, help="Seconds that what runs gets at the end."
)

process_options = stack(
    telemetry_options,
    click.option("--probe-host", default="127.0.0.1", show_default=True, help="Address of /live, /health, /metrics."),
    click.option("--probe-port", type=int, default=0, show_default=True, help="Its port; 0 takes a free one."),
    drain_option,
)

dialer_options = stack(
    click.option(
        "--rpc-ca",
        type=_file,
        envvar="GREENROOM_RPC_CA",
        help="Who signs the services' certificates: calls between services are mutual TLS.",
    ),
    click.option("--rpc-cert", type=_file, envvar="GREENROOM_RPC_CERT", help="Our own certificate, to both sides."),
    click.option("--rpc-key", type=_file, envvar="GREENROOM_RPC_KEY", help="Its key."),
    click.option(
        "--rpc-name",
        envvar="GREENROOM_RPC_NAME",
        help="The name that the certificate of every service has which is called.  [default: its address]",
    ),
)

listen_options = stack(
    click.option(
        "--listen",
        default="127.0.0.1:0",
        show_default=True,
        help="host:port for the other services' calls; port 0 takes a free one. Beyond loopback it takes --rpc-ca, "
        "--rpc-cert and --rpc-key, or --insecure-rpc.",
    ),
    click.option(
        "--advertise", help="host:port under which the other services reach it.  [default: as --listen has it]"
    ),
    click.option(
        "--insecure-rpc",
        is_flag=True,
        envvar="GREENROOM_INSECURE_RPC",
        help="Listen beyond loopback without certificates: whoever reaches the port can run and cancel requests.",
    ),
)


def log_from(options: dict[str, Any]) -> KafkaLog:
    """Reads the options of ``log_options``. Raises InvalidConfig."""
    from greenroom.fabric.log.kafka.kafka_log import KafkaLog

    return KafkaLog(log_config_from(options))


def log_config_from(options: dict[str, Any]) -> LogConfig:
    """Reads the options of ``log_options``. Raises InvalidConfig."""
    from greenroom.fabric.log.config import LogConfig

    return LogConfig(
        brokers=tuple(broker.strip() for broker in options["brokers"].split(",") if broker.strip()),
        prefix=options["topic_prefix"],
        tls=options["kafka_tls"],
        ca_file=options["kafka_ca"],
        cert_file=options["kafka_cert"],
        key_file=options["kafka_key"],
        sasl_mechanism=options["kafka_sasl"],
        sasl_user=options["kafka_user"],
        sasl_password_file=options["kafka_password_file"],
        session_timeout_s=options["kafka_session_timeout"],
    )


def dialer_from(options: dict[str, Any]) -> GrpcDialer:
    """Reads the options of ``dialer_options``. Raises InvalidConfig."""
    from greenroom.fabric.rpc import DialerConfig, DialerTls, GrpcDialer

    files = _certificates(options)
    if files is None:
        return GrpcDialer()
    ca, certificate, key = files
    tls = DialerTls(ca=ca, certificate=certificate, key=key, server_name=options["rpc_name"])
    return GrpcDialer(DialerConfig(tls=tls))


def server_from(options: dict[str, Any]) -> ServerConfig:
    """Reads the options of ``listen_options`` and ``dialer_options``: with certificates only callers are served whose
    certificate the CA has signed. Raises InvalidConfig, also for an address beyond loopback without certificates,
    unless ``--insecure-rpc`` says so."""
    from greenroom.fabric.rpc import ServerConfig, ServerTls

    host, port = split_address("listen", options["listen"])
    files = _certificates(options)
    if files is None:
        if not is_loopback(host) and not options["insecure_rpc"]:
            raise InvalidConfig(
                "listen",
                options["listen"],
                "beyond loopback whoever reaches it could list, run and cancel requests and write into answers; give "
                "--rpc-ca, --rpc-cert and --rpc-key (mutual TLS), or --insecure-rpc where nobody else is on that "
                "network",
            )
        return ServerConfig(host=host, port=port)
    ca, certificate, key = files
    return ServerConfig(host=host, port=port, tls=ServerTls(certificate=certificate, key=key, client_ca=ca))


def _certificates(options: dict[str, Any]) -> tuple[Path, Path, Path] | None:
    """CA, certificate and key; None where there are none. Raises InvalidConfig where some are missing: half of them
    would leave one direction open that looks closed."""
    names = ("rpc_ca", "rpc_cert", "rpc_key")
    ca, certificate, key = (options[name] for name in names)
    if ca is None and certificate is None and key is None:
        return None
    if ca is None or certificate is None or key is None:
        missing = next(name for name in names if options[name] is None)
        raise InvalidConfig(missing, None, "--rpc-ca, --rpc-cert and --rpc-key come together: calls are mutual TLS")
    return ca, certificate, key


def endpoint_from(options: dict[str, Any]) -> NetworkEndpoint:
    """Where the other services call: ``server_from``, known to them as ``advertised``. Raises InvalidConfig."""
    from greenroom.fabric.rpc import NetworkEndpoint

    server = server_from(options)
    advertised(options, server.port)
    return NetworkEndpoint(server, lambda port: advertised(options, port))


def advertised(options: dict[str, Any], port: int) -> str:
    """The address under which the process is reached that listens on ``port``."""
    if options["advertise"]:
        host, given = split_address("advertise", options["advertise"])
        return f"{_bracketed(host)}:{given or port}"
    host, _ = split_address("listen", options["listen"])
    if host in ("0.0.0.0", "::"):  # every interface: the name is what others know
        host = socket.gethostname()
    return f"{_bracketed(host)}:{port}"


def split_address(field: str, address: str) -> tuple[str, int]:
    """host:port. Raises InvalidConfig."""
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise InvalidConfig(field, address, "write host:port, such as 0.0.0.0:7001 or [::1]:7001")
    return host, int(port)


def refuse_taken(field: str, host: str, port: int | None) -> None:
    """Raises InvalidConfig where nobody could listen on that port now, for what would find out only after it has loaded
    a model. What else is wrong with an address is told when it is listened on."""
    if not port:
        return
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return
    except UnicodeError as error:
        raise InvalidConfig(field, host, "no host can have this name") from error
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as candidate:
                candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    candidate.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                candidate.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                where = f"{_bracketed(host)}:{port}"
                allowed = (
                    f"it can not be listened on: {error.strerror}; choose another with --{field.replace('_', '-')}"
                )
                raise InvalidConfig(field, where, allowed) from error


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def instance_from(options: dict[str, Any], kind: str) -> str:
    """A name that no other process has or had."""
    name = options["instance"] or f"{socket.gethostname()}-{kind}"
    return f"{name}.{os.getpid():x}{uuid.uuid4().hex[:8]}"


def traces_from(options: dict[str, Any], kind: str, instance: str) -> TelemetryConfig | None:
    """Reads ``--otlp-endpoint``: where spans go, if anywhere. Raises InvalidConfig, also where opentelemetry is not
    installed."""
    if not options["otlp_endpoint"]:
        return None
    from greenroom.fabric.telemetry import TelemetryConfig

    config = TelemetryConfig(endpoint=options["otlp_endpoint"], service=f"greenroom-{kind}", instance=instance)
    importlib.import_module("greenroom.fabric.telemetry.tracing")
    return config
