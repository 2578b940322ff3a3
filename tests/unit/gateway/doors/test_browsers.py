"""By which names the server may be called, and pages of which origins may read its answers."""

from __future__ import annotations

from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from greenroom.cli.gateway_options import gateway_config, gateway_options
from greenroom.core.errors import InvalidConfig
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.doors.hosts import EXPOSED, Hosts, Origins, is_preflight
from greenroom.gateway.errors import ApiError
from greenroom.gateway.replies.reply_headers import HINTS_HEADER, REPLY_ID_HEADER


def refused(hosts: Hosts, said: str) -> bool:
    found: ApiError | None = None
    try:
        hosts.check([said])
    except ApiError as error:
        found = error
    if found is None:
        return False
    assert (found.status, found.code, found.param) == (403, "host_not_allowed", "Host")
    assert "--allowed-hosts" in str(found)
    assert len(str(found)) < 400
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LocalHost:8000", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3",
        "[::1]", "[::1]:8000",
    ],
)  # fmt: skip
def test_names_of_this_machine_s_loopback_pass(host: str) -> None:
    assert not refused(Hosts("127.0.0.1"), host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8000", "localhost.evil.example", "notlocalhost", "127.0.0.1.evil.example",
        "192.168.1.5", "[2001:db8::1]:80", "0.0.0.0", "a b", "", "localhost@evil.example", "evil.example#localhost",
        "[::1].evil.example", "127.0.0.1:80:80", "x" * 5000,
    ],
)  # fmt: skip
def test_other_names_do_not(host: str) -> None:
    assert refused(Hosts("127.0.0.1"), host)


def test_what_is_allowed_passes_and_nothing_beside_it() -> None:
    hosts = Hosts("10.1.2.3", ["gpu-box.lan", "Other.Example.", "2001:db8::1"])
    for host in ("gpu-box.lan", "GPU-box.lan:8000", "other.example", "10.1.2.3:80", "[2001:db8::1]:9", "localhost"):
        assert not refused(hosts, host)
    for host in ("box.lan", "x.gpu-box.lan", "10.1.2.4"):
        assert refused(hosts, host)
    assert not refused(Hosts("127.0.0.1", ["*"]), "evil.example")


def test_one_foreign_name_among_several_is_refused() -> None:
    with pytest.raises(ApiError):
        Hosts("127.0.0.1").check(["localhost", "evil.example"])
    Hosts("127.0.0.1").check([])  # HTTP/1.0 need not say any


def test_a_probe_may_call_any_address_and_no_other_name() -> None:
    hosts = Hosts("127.0.0.1", ["gpu-box.lan"])
    for host in ("10.1.2.3:8000", "[2001:db8::1]:80", "gpu-box.lan", "localhost"):
        hosts.check([host], probe=True)
    for host in ("evil.example", "10.1.2.3.evil.example", "", "a b"):
        with pytest.raises(ApiError):
            hosts.check([host], probe=True)


@pytest.mark.parametrize("name", ["", "http://x", "a b", "x/y", "-x", "*.example"])
def test_what_is_no_name_is_refused_at_the_start(name: str) -> None:
    with pytest.raises(InvalidConfig, match="allowed_hosts"):
        Hosts("127.0.0.1", [name])


@given(st.text(max_size=40))
def test_nothing_but_a_loopback_name_passes(host: str) -> None:
    if not refused(Hosts("127.0.0.1"), host):
        name = host.rpartition(":")[0] if host.count(":") == 1 else host
        assert name.lower().rstrip(".").endswith("localhost") or name.startswith(("127.", "[", "::1"))


# -- origins ---------------------------------------------------------------------------------------------------------

PAGE = "https://chat.example:8443"


def test_without_origins_nothing_is_said() -> None:
    assert not Origins()
    assert Origins().headers(PAGE) == {}


def test_a_page_of_an_allowed_origin_may_read_what_clients_need() -> None:
    found = Origins([PAGE]).headers(PAGE)
    assert (found["Access-Control-Allow-Origin"], found["Vary"]) == (PAGE, "Origin")
    assert found["Access-Control-Expose-Headers"] == ", ".join(EXPOSED)
    assert {REPLY_ID_HEADER, HINTS_HEADER, "Retry-After", "X-Request-Id"} <= set(EXPOSED)
    assert "Access-Control-Allow-Credentials" not in found


@pytest.mark.parametrize("origin", [None, "null", "https://chat.example", "http://chat.example:8443", PAGE + "0"])
def test_no_other_page_may(origin: str | None) -> None:
    assert Origins([PAGE]).headers(origin) == {"Vary": "Origin"}
    with pytest.raises(ApiError) as caught:
        Origins([PAGE]).preflight({} if origin is None else {"Origin": origin})
    assert (caught.value.status, caught.value.code) == (403, "origin_not_allowed")
    assert Origins(["*"]).headers(origin)["Access-Control-Allow-Origin"] == "*"


def test_a_preflight_is_told_what_may_be_sent() -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang"}
    told = Origins([PAGE]).preflight(asked)
    assert told["Access-Control-Allow-Headers"] == "authorization,content-type,x-stainless-lang"
    assert told["Access-Control-Allow-Methods"] == "GET, POST"
    for odd in ("a: b", "a\r\nSet-Cookie: x", "x" * 5000, ","):
        told = Origins([PAGE]).preflight({"Origin": PAGE, "Access-Control-Request-Headers": odd})
        assert told["Access-Control-Allow-Headers"].startswith("Authorization, Content-Type")


def test_what_a_preflight_is() -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    assert is_preflight("OPTIONS", asked)
    assert not is_preflight("POST", asked)
    assert not is_preflight("OPTIONS", {"Origin": PAGE})


@pytest.mark.parametrize("origin", ["", "chat.example", "https://", PAGE + "/", "https://u@x", "https://x:0", "a b"])
def test_what_is_no_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(InvalidConfig, match="allowed_origins"):
        Origins([origin])


# -- the options -----------------------------------------------------------------------------------------------------


def config_of(*arguments: str, **environment: str) -> GatewayConfig:
    """What a command with the gateway's options makes of them."""
    made: list[GatewayConfig] = []

    @click.command(context_settings={"auto_envvar_prefix": "GREENROOM_SERVE"})
    @gateway_options(grpc_port="none", linger_s=2.0)
    def command(**options: Any) -> None:
        made.append(gateway_config(options))

    CliRunner().invoke(command, list(arguments), env=environment, catch_exceptions=False)
    return made[0]


def test_names_and_origins_come_from_options_or_the_environment() -> None:
    assert (config_of().allowed_hosts, config_of().allowed_origins) == ((), ())
    given = config_of("--allowed-hosts", "gpu-box.lan, other", "--allowed-origins", f"{PAGE},http://localhost:3000")
    assert given.allowed_hosts == ("gpu-box.lan", "other")
    assert given.allowed_origins == (PAGE, "http://localhost:3000")
    assert config_of(GREENROOM_SERVE_ALLOWED_HOSTS="*").allowed_hosts == ("*",)
