"""Both ports behind a certificate."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from greenroom.client import AsyncClient, Tls, Unavailable
from greenroom.core.errors import InvalidConfig
from greenroom.gateway import GatewayConfig
from tests.contract.rpc.certificates import NAME, make_signer
from tests.pipeline.client.conftest import Start
from tests.scripted_generator import TEXT


async def test_both_ports_talk_tls(start: Start, tmp_path: Path) -> None:
    signer = make_signer(tmp_path)
    certificate, key = signer.sign("gateway")
    place = await start(tls_certificate=certificate, tls_key=key)
    async with AsyncClient(place.address, tls=Tls(ca=signer.ca, server_name=NAME)) as client:
        assert (await client.generate("hello")).text == TEXT
    async with AsyncClient(place.address, max_retries=0) as stranger:
        with pytest.raises(Unavailable):
            await stranger.generate("hello", timeout_s=10)
    port = place.gateway._runner.addresses[0][1]
    trusted = ssl.create_default_context(cafile=str(signer.ca))
    live = f"https://127.0.0.1:{port}/live"
    async with aiohttp.ClientSession() as http, http.get(live, ssl=trusted, server_hostname=NAME) as response:
        assert response.status == 200


async def test_a_certificate_that_can_not_be_used_is_named(start: Start, tmp_path: Path) -> None:
    (tmp_path / "x.pem").write_text("nothing")
    with pytest.raises(InvalidConfig, match=r"tls_certificate: .*can not be used"):
        await start(tls_certificate=tmp_path / "x.pem", tls_key=tmp_path / "x.pem")
    with pytest.raises(InvalidConfig, match="a certificate and its key come together"):
        GatewayConfig(tls_certificate=tmp_path / "x.pem")
