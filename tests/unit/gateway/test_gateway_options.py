"""What is wrong with the gateway's options is told at the start, before a model is loaded or a log is joined."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry

from greenroom.cli.main import main
from greenroom.core.errors import InvalidConfig
from greenroom.gateway import Gateway, GatewayConfig
from greenroom.text import TextProcessor
from tests import small_tokenizers
from tests.scripted_generator import ScriptedGenerator


@pytest.mark.parametrize("command", ["gateway", "serve"])
@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".example"])
def test_a_host_that_can_not_exist(command: str, host: str) -> None:
    done = CliRunner().invoke(main, [command, "--host", host])
    assert done.exit_code == 1
    assert f"Error: host: '{host}' is not allowed; no host can have this name" in done.output


@pytest.mark.parametrize("command", ["gateway", "serve"])
def test_a_certificate_that_can_not_be_used(command: str, tmp_path: Path) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_text("not PEM")
    key.write_text("not PEM")
    done = CliRunner().invoke(main, [command, "--tls-certificate", str(certificate), "--tls-key", str(key)])
    assert done.exit_code == 1
    assert (
        f"Error: tls_certificate: '{certificate}' is not allowed; it can not be used with the key {key}" in done.output
    )


def test_a_collaboration_has_no_tokenizer() -> None:
    done = CliRunner().invoke(main, ["gateway", "--coe", "--model", "some"])
    assert done.exit_code == 1
    assert "Error: model: 'some' is not allowed; with --coe there is no tokenizer to read" in done.output


async def test_a_taken_port_is_told_with_the_option_that_chooses_another(tmp_path: Path) -> None:
    text = TextProcessor.from_folder(small_tokenizers.write_chat(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = GatewayConfig(port=other.getsockname()[1])
        gateway = Gateway(config, ScriptedGenerator(text.tokenizer), text, CollectorRegistry())
        with pytest.raises(InvalidConfig, match="choose another with --port") as caught:
            await gateway.start()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EADDRINUSE
        await gateway.stop()
