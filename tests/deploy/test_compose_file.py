"""What compose.yaml promises of every container, without starting one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from greenroom.cli.main import main
from tests.deploy.compose import COMPOSE, ROOT, compose, seconds, services, variables
from tests.deploy.image import certificates

NAMES = sorted(services())
STAYING = [name for name in NAMES if services()[name]["restart"] != "no"]
ONCE = {"certificates", "kafka-user", "keys"}
OURS = [name for name in STAYING if services()[name]["image"].startswith("greenroom-")]
_SECRET = re.compile(r"password|secret|token|api_?key", re.IGNORECASE)


def test_it_keeps_the_compose_specification() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_what_it_depends_on_is_there(name: str) -> None:
    service = services()[name]
    for other, how in service.get("depends_on", {}).items():
        assert other in services()
        if how["condition"] == "service_healthy":
            assert "test" in services()[other]["healthcheck"]
        else:
            assert how["condition"] == "service_completed_successfully"
            assert other in ONCE
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        if source.startswith("."):
            assert (ROOT / source).is_dir(), f"{source} is mounted and not in the repository"
        else:
            assert source in compose()["volumes"], f"{source} is not declared"
    assert set(service.get("secrets", [])) <= set(compose()["secrets"])
    assert ("networks" in service) != ("network_mode" in service), "the network by default is one that all share"
    assert set(service.get("networks", [])) <= set(compose()["networks"])


def test_no_volume_and_no_secret_is_left_over() -> None:
    used = {volume.partition(":")[0] for service in services().values() for volume in service.get("volumes", [])}
    assert set(compose()["volumes"]) <= used
    assert set(compose()["secrets"]) == {name for service in services().values() for name in service.get("secrets", [])}


@pytest.mark.parametrize("name", NAMES)
def test_ports_are_published_on_loopback_only(name: str) -> None:
    for port in services()[name].get("ports", []):
        assert port.startswith("127.0.0.1:"), port


@pytest.mark.parametrize("name", NAMES)
def test_it_can_do_little_beside_its_work(name: str) -> None:
    service = services()[name]
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service.get("privileged")
    assert service.get("user", "10001") not in ("root", "0", "0:0")
    assert service.get("read_only") or name == "kafka", "only Kafka's start script writes into its root"
    assert service.get("network_mode") != "host"
    assert not any("docker.sock" in volume for volume in service.get("volumes", []))


@pytest.mark.parametrize("name", NAMES)
def test_its_resources_are_limited(name: str) -> None:
    limits = services()[name]["deploy"]["resources"]["limits"]
    assert re.fullmatch(r"\d+[mg]", limits["memory"])
    assert limits["pids"] > 0
    assert float(limits["cpus"]) <= 1, "more is refused where the machine has fewer; a worker's 0 is all there are"
    assert services()[name]["logging"]["options"]["max-size"]


@pytest.mark.parametrize("name", STAYING)
def test_it_is_watched_and_started_again(name: str) -> None:
    service = services()[name]
    assert service["restart"] == "unless-stopped"
    health = service["healthcheck"]
    assert seconds(health["timeout"]) <= seconds(health["interval"])
    assert health["retries"] >= 3


def test_what_ends_by_itself_is_known() -> None:
    assert set(NAMES) - set(STAYING) == ONCE


@pytest.mark.parametrize("name", NAMES)
def test_images_are_pinned_or_built_here(name: str) -> None:
    image = services()[name]["image"]
    built = {service["image"]: service["build"]["target"] for service in services().values() if "build" in service}
    if image.startswith("greenroom-"):
        assert built[image] == image.partition(":")[0].removeprefix("greenroom-")
    else:
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", image), image


@pytest.mark.parametrize("name", NAMES)
def test_containers_can_be_scaled(name: str) -> None:
    service = services()[name]
    assert "container_name" not in service
    assert "hostname" not in service


def test_no_secret_is_in_the_file() -> None:
    for name, service in services().items():
        for key, value in service.get("environment", {}).items():
            if _SECRET.search(key) and not key.endswith("_FILE"):
                assert not value, f"{key} of {name} has a value"
    for name, default in variables(COMPOSE.read_text(encoding="utf-8")).items():
        if _SECRET.search(name) and not name.endswith("_FILE"):
            assert not default, f"{name} has a default"


def _command(name: str) -> tuple[click.Command, list[str]]:
    command, *arguments = services()[name]["command"]
    assert isinstance(main, click.Group)
    found = main.commands.get(command)
    assert found is not None, f"greenroom has no command {command!r}: {', '.join(main.commands)}"
    return found, arguments


@pytest.mark.parametrize("name", OURS)
def test_the_command_is_understood(name: str) -> None:
    command, arguments = _command(name)
    context = click.Context(command)
    options, rest, _ = command.make_parser(context).parse_args(list(arguments))
    assert rest == []
    for parameter in command.params:
        value = options.get(parameter.name or "")
        if isinstance(value, str):
            parameter.type_cast_value(context, value)


@pytest.mark.parametrize("name", OURS)
def test_the_environment_is_understood(name: str) -> None:
    command, _ = _command(name)
    known = {f"GREENROOM_{command.name}_{parameter.name}".upper() for parameter in command.params}
    for parameter in command.params:
        named = parameter.envvar or ()
        known.update([named] if isinstance(named, str) else named)
    elsewhere = {"GREENROOM_HEALTH_URL", "HF_TOKEN"}
    assert set(services()[name]["environment"]) <= known | elsewhere


@pytest.mark.parametrize("name", OURS)
def test_it_may_drain_before_it_is_killed(name: str) -> None:
    command, arguments = _command(name)
    options, _, _ = command.make_parser(click.Context(command)).parse_args(list(arguments))
    default = next(parameter.default for parameter in command.params if parameter.name == "drain_timeout")
    drain_s = float(str(options.get("drain_timeout") or default))
    assert seconds(services()[name]["stop_grace_period"]) >= drain_s + 10


def test_the_gateway_asks_for_keys() -> None:
    _, arguments = _command("gateway")
    file = next(argument.partition("=")[2] for argument in arguments if argument.startswith("--keys-file="))
    assert services()["keys"]["environment"]["GREENROOM_KEYS_FILE"] == file
    folder = file.rpartition("/")[0]
    assert f"keys:{folder}:ro" in services()["gateway"]["volumes"]
    assert f"keys:{folder}" in services()["keys"]["volumes"]


def _volumes(name: str) -> dict[str, str]:
    """Sources by where they are mounted; what is for reading alone is marked so."""
    return {volume.split(":", 1)[1]: volume.split(":", 1)[0] for volume in services()[name].get("volumes", [])}


def test_only_the_gateway_can_be_reached_from_the_front() -> None:
    assert {name for name in NAMES if "front" in services()[name].get("networks", [])} == {"gateway"}
    back = {name for name in NAMES if "back" in services()[name].get("networks", [])}
    assert back == {*OURS, "kafka", "prometheus"}
    assert {name for name in NAMES if services()[name].get("network_mode") == "none"} == {"certificates", "keys"}


@pytest.mark.parametrize("name", [*OURS, "kafka", "kafka-user"])
def test_it_has_its_own_identity_and_no_other(name: str) -> None:
    whose = {"worker-gpu": "identity-worker", "kafka-user": "kafka-user"}.get(name, f"identity-{name}")
    assert _volumes(name)["/run/greenroom:ro"] == whose
    secrets = {"authority", "kafka-user"} | {volume for volume in compose()["volumes"] if "identity" in volume}
    assert set(_volumes(name).values()) & secrets == {whose}


def test_nobody_but_who_makes_certificates_has_the_authority() -> None:
    assert [name for name in NAMES if "authority" in _volumes(name).values()] == ["certificates"]
    folders = {f"/var/lib/greenroom/identities/{service.name}" for service in certificates.SERVICES}
    assert {where for where in _volumes("certificates") if "identities" in where} == folders


def test_brokers_ask_for_a_password_beyond_their_own_container() -> None:
    settings = services()["kafka"]["environment"]
    protocols = dict(pair.split(":") for pair in settings["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(","))
    listeners = dict(listener.split("://") for listener in settings["KAFKA_LISTENERS"].split(","))
    assert {name for name, where in listeners.items() if not where.startswith("127.0.0.1:")} == {"SERVICES"}
    assert protocols["SERVICES"] == "SASL_SSL"
    # The image's start script knows the names SSL and SASL_SSL, and wants files for them that are not here.
    assert "SSL://" not in settings["KAFKA_ADVERTISED_LISTENERS"]
    environment = services()["tasktype"]["environment"]
    mechanism = settings["KAFKA_LISTENER_NAME_SERVICES_SASL_ENABLED_MECHANISMS"]
    assert environment["GREENROOM_KAFKA_SASL"] == mechanism == "SCRAM-SHA-256"
    assert f"--entity-name {environment['GREENROOM_KAFKA_USER']} " in services()["kafka-user"]["command"][0] + " "


def test_no_program_is_told_the_password_as_an_argument(tmp_path: Path) -> None:
    """Any user of the host can list those. What the broker's tool is told goes into its input."""
    (tmp_path / "password").write_text("the-password")
    tool = tmp_path / "java"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\ncat > {tmp_path}/input\n')
    tool.chmod(0o755)
    service = services()["kafka-user"]
    script = service["command"][0].replace("$$", "$").replace("/run/greenroom", str(tmp_path))
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run([*service["entrypoint"], script], env=environment, timeout=60, check=True)
    assert "the-password" not in (tmp_path / "arguments").read_text()
    assert (tmp_path / "arguments").read_text().endswith("--add-config-file /dev/stdin\n")
    assert (tmp_path / "input").read_text() == "SCRAM-SHA-256=password=the-password\n"


@pytest.mark.parametrize("name", OURS)
def test_its_files_are_those_that_are_made(name: str, identities: Path) -> None:
    mine = identities / "identities" / name.removesuffix("-gpu")
    environment = services()[name]["environment"]
    files = {key: value for key, value in environment.items() if str(value).startswith("/run/greenroom/")}
    assert {"GREENROOM_KAFKA_CA", "GREENROOM_KAFKA_PASSWORD_FILE"} <= set(files)
    assert all((mine / value.removeprefix("/run/greenroom/")).is_file() for value in files.values())
    if name != "tasktype":
        assert {"GREENROOM_RPC_CA", "GREENROOM_RPC_CERT", "GREENROOM_RPC_KEY"} <= set(files)
        assert environment["GREENROOM_RPC_NAME"] == certificates.NAME
    assert "GREENROOM_INSECURE_RPC" not in environment


def test_a_release_names_every_image_by_digest() -> None:
    """Each has a variable; built ones take their base's as a build argument."""
    text = COMPOSE.read_text(encoding="utf-8")
    for service in services().values():
        image, build = service["image"], service.get("build")
        if build is not None:
            assert "BASE_IMAGE" in build["args"]
        elif not image.startswith("greenroom-"):
            assert re.search(rf"\$\{{GREENROOM_[A-Z]+_IMAGE:-{re.escape(image)}\}}", text), image


def test_whoever_starts_on_a_gpu_is_found_as_a_worker() -> None:
    gpu: dict[str, Any] = services()["worker-gpu"]
    assert {name: found["aliases"] for name, found in gpu["networks"].items()} == {"back": ["worker"]}
    assert services()["worker"]["networks"] == ["back"]
    assert [device["capabilities"] for device in gpu["deploy"]["resources"]["reservations"]["devices"]] == [["gpu"]]
    same = {"environment", "volumes", "image", "depends_on", "stop_grace_period"}
    assert all(gpu[field] == services()["worker"][field] for field in same)
    assert set(services()["worker"]["command"]) < set(gpu["command"])
