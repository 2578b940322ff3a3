"""The options of the front door, the same for every command that has one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from greenroom.gateway import GatewayConfig

F = TypeVar("F", bound=Callable[..., Any])

_file = click.Path(exists=True, dir_okay=False, path_type=Path)
_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on, for both APIs."),
    click.option("--port", type=int, default=8000, show_default=True, help="Port of the HTTP API; 0 takes a free one."),
    click.option(
        "--keys-file",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="GREENROOM_KEYS_FILE",
        help="API keys (see greenroom keys). Without it everybody is let in, on a loopback address only.",
    ),
    click.option(
        "--allowed-hosts",
        metavar="NAMES",
        help="Names, with commas between, by which it may be called beside --host and localhost; * for any.  [default: "
        "none, with API keys any]",
    ),
    click.option(
        "--allowed-origins",
        metavar="ORIGINS",
        help="Web pages of which origins, with commas between, may use it from a browser (CORS), such as "
        "https://chat.example; * for any.  [default: none]",
    ),
    click.option(
        "--open-metrics/--no-open-metrics", default=True, show_default=True, help="Whether /metrics needs no key."
    ),
    click.option("--tls-certificate", type=_file, help="PEM file: both APIs talk TLS."),
    click.option("--tls-key", type=_file, help="Its key."),
    click.option("--max-in-flight", type=int, default=1024, show_default=True, help="Requests at once; more get 429."),
    click.option("--max-prompt-tokens", type=int, help="Of one prompt.  [default: what the context holds]"),
    click.option("--max-new-tokens", type=int, help="Of one answer.  [default: what the context holds]"),
    click.option(
        "--generation-config",
        type=click.Choice(["auto", "none"]),
        default="auto",
        show_default=True,
        help="Whose sampling defaults a request gets that does not say: auto, the checkpoint's own "
        "(generation_config.json); none, OpenAI's.",
    ),
    click.option(
        "--request-timeout",
        type=float,
        default=600.0,
        show_default=True,
        help="Seconds that a request may take which does not say so itself.",
    ),
    click.option(
        "--max-request-timeout", type=float, default=3600.0, show_default=True, help="The most that one may ask for."
    ),
)


def gateway_options(*, grpc_port: str, linger_s: float) -> Callable[[F], F]:
    """``grpc_port``: where the gRPC API is by default; ``linger_s``: the default of ``--linger``."""

    def add(command: F) -> F:
        rpc = click.option(
            "--grpc-port",
            default=grpc_port,
            show_default=True,
            help="Port of the gRPC API; 0 takes a free one, none switches it off.",
        )
        linger = click.option(
            "--linger",
            type=float,
            default=linger_s,
            show_default=True,
            help="Seconds at the end in which it still answers, with 503, who holds a connection.",
        )
        for option in reversed((rpc, *_OPTIONS, linger)):
            command = option(command)
        return command

    return add


def gateway_config(options: dict[str, Any], **more: Any) -> GatewayConfig:
    """Takes the options of ``gateway_options`` out of ``options``; ``more``: further fields. Raises InvalidConfig, also
    for a certificate that can not be used: a model may take minutes to load before anything listens."""
    from greenroom.core.errors import InvalidConfig
    from greenroom.gateway import GatewayConfig

    grpc_port = options.pop("grpc_port")
    if grpc_port != "none" and not grpc_port.isdecimal():
        raise InvalidConfig("grpc_port", grpc_port, "it is a number from 0 (a free one) to 65535, or none")
    config = GatewayConfig(
        grpc_port=None if grpc_port == "none" else int(grpc_port),
        request_timeout_s=options.pop("request_timeout"),
        max_request_timeout_s=options.pop("max_request_timeout"),
        linger_s=options.pop("linger"),
        allowed_hosts=_listed(options.pop("allowed_hosts")),
        allowed_origins=_listed(options.pop("allowed_origins")),
        **{
            name: options.pop(name)
            for name in (
                "host", "port", "keys_file", "open_metrics", "tls_certificate", "tls_key", "max_in_flight",
                "max_prompt_tokens", "max_new_tokens", "generation_config",
            )
        },
        **more,
    )  # fmt: skip
    config.tls_context()
    return config


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())
