"""A service takes calls from this machine alone, from holders of a certificate, or by `--insecure-rpc` from all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from greenroom.cli.gateway import gateway
from greenroom.cli.main import main
from greenroom.cli.predictor import predictor
from greenroom.cli.scheduler import scheduler
from greenroom.cli.service_options import dialer_from, dialer_options, listen_options, refuse_taken, server_from
from greenroom.cli.worker import worker
from greenroom.core.errors import InvalidConfig
from greenroom.core.hosts import is_loopback

OPEN = ["0.0.0.0:7000", "[::]:7000", "192.168.1.5:7000", "worker-1:7000"]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Options that name certificates, which are not read yet."""
    made = {name: tmp_path / name for name in ("ca", "cert", "key")}
    for path in made.values():
        path.write_text("-")
    return made


def options(*arguments: str, **environment: str) -> dict[str, Any]:
    """As a service has them that was started with ``arguments``."""
    taken: dict[str, Any] = {}

    @click.command()
    @listen_options
    @dialer_options
    def service(**options: Any) -> None:
        taken.update(options)

    done = CliRunner().invoke(service, arguments, env=environment, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return taken


def mutual(files: dict[str, Path]) -> list[str]:
    return [word for name, path in files.items() for word in (f"--rpc-{name}", str(path))]


@pytest.mark.parametrize("address", OPEN)
def test_beyond_loopback_it_is_refused_and_said_what_to_do(address: str) -> None:
    with pytest.raises(InvalidConfig, match=r"^listen: .*--rpc-ca, --rpc-cert and --rpc-key.*--insecure-rpc") as error:
        server_from(options("--listen", address))
    assert repr(address) in str(error.value)


@pytest.mark.parametrize("address", OPEN)
def test_beyond_loopback_with_certificates_only_their_owners_are_served(address: str, files: dict[str, Path]) -> None:
    tls = server_from(options("--listen", address, *mutual(files))).tls
    assert tls is not None
    assert (tls.certificate, tls.key, tls.client_ca) == (files["cert"], files["key"], files["ca"])


def test_with_insecure_rpc_a_service_listens_without_certificates() -> None:
    assert server_from(options("--listen", OPEN[0], "--insecure-rpc")).tls is None
    assert server_from(options("--listen", OPEN[0], GREENROOM_INSECURE_RPC="1")).tls is None
    with pytest.raises(InvalidConfig, match=r"^listen"):
        server_from(options("--listen", OPEN[0], GREENROOM_INSECURE_RPC="0"))


@pytest.mark.parametrize("address", ["127.0.0.1:0", "[::1]:7000", "localhost:7000", "127.8.8.8:7000"])
def test_this_machine_needs_no_certificate(address: str) -> None:
    assert server_from(options("--listen", address)).tls is None


@pytest.mark.parametrize("missing", ["ca", "cert", "key"])
@pytest.mark.parametrize("address", ["127.0.0.1:0", OPEN[0]])
def test_half_of_the_files_is_refused(missing: str, address: str, files: dict[str, Path]) -> None:
    """A certificate without its key was once taken for none; a CA without one, for a dialer that shows none."""
    del files[missing]
    given = options("--listen", address, *mutual(files), "--insecure-rpc")
    for make in (server_from, dialer_from):
        with pytest.raises(InvalidConfig, match=rf"^rpc_{missing}: .*come together"):
            make(given)


@pytest.mark.parametrize(
    ("host", "is_one"),
    [
        ("127.0.0.1", True), ("::1", True), ("LOCALHOST", True), ("::ffff:127.0.0.1", True),
        ("::ffff:10.0.0.1", False), ("localhost.evil.example", False), ("", False),
    ],
)  # fmt: skip
def test_what_loopback_is(host: str, is_one: bool) -> None:
    assert is_loopback(host) is is_one


def test_what_no_name_can_be_is_told() -> None:
    with pytest.raises(InvalidConfig, match=r"^listen: 'a\.\.b' .* no host"):
        refuse_taken("listen", "a..b", 7000)


@pytest.mark.parametrize("command", [gateway, predictor, worker])
def test_a_service_does_not_start(command: click.Command) -> None:
    assert command.name is not None
    done = CliRunner().invoke(main, [command.name, "--listen", "0.0.0.0:0"])
    assert done.exit_code == 1
    assert "--insecure-rpc" in done.output


@pytest.mark.parametrize("command", [gateway, predictor, scheduler, worker])
def test_every_option_has_a_variable_for_all_services(command: click.Command) -> None:
    named = {parameter.name: parameter.envvar for parameter in command.params}
    asked = ["rpc_ca", "rpc_cert", "rpc_key", "rpc_name"] + ["insecure_rpc"] * (command is not scheduler)
    for option in asked:
        assert named[option] == f"GREENROOM_{option.upper()}"
