"""Pages in a browser, over HTTP: foreign names of the host, preflights, and a real browser where there is one."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from greenroom.core.generation import FinishReason
from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys
from tests.pipeline.gateway.conftest import Server
from tests.pipeline.gateway.test_errors import shaped
from tests.scripted_generator import DEADLINE_S, TEXT

COMPLETION: dict[str, Any] = {"model": "org/small", "prompt": "hello", "max_tokens": 100}
PAGE = "https://chat.example"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
BROWSER_S = 120.0


def preflight(origin: str, headers: str = "authorization,content-type") -> dict[str, str]:
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": headers,
    }


async def ask(server: Server, method: str, path: str, **headers: str) -> tuple[int, Any, Any]:
    async with server.http.request(method, server.url + path, headers=headers) as response:
        raw = await response.read()
        return response.status, json.loads(raw) if raw.startswith(b"{") else raw, response.headers


@pytest.fixture
def ann(tmp_path: Path) -> tuple[Path, str]:
    """A file of keys, and one of them."""
    made, text = new_key("ann", KeyLimits(), utc_now())
    path = tmp_path / "keys.json"
    with changing(path) as present:
        write_keys(path, present.add(made))
    return path, text


class TestHosts:
    async def test_a_page_whose_name_was_bound_to_this_machine_gets_nothing(self, server: Server) -> None:
        for path in ("/v1/models", "/health", "/metrics", "/openapi.json", "/nowhere"):
            status, body, _ = await ask(server, "GET", path, Host="evil.example:8000")
            error = shaped(body)
            assert (status, error["code"], error["param"]) == (403, "host_not_allowed", "Host")
            assert "--allowed-hosts" in error["message"]
        assert (await server.post("/v1/completions", COMPLETION, headers={"Host": "evil.example"}))[0] == 403
        assert server.generator.seen == []

    async def test_this_machine_s_names_pass(self, server: Server) -> None:
        for host in (f"127.0.0.1:{server.port}", "localhost", "[::1]:8000"):
            assert (await ask(server, "GET", "/v1/models", Host=host))[0] == 200

    @pytest.mark.parametrize("config", [{"allowed_hosts": ("gpu-box.lan",)}])
    async def test_a_name_that_is_allowed_passes(self, server: Server) -> None:
        assert (await ask(server, "GET", "/v1/models", Host="gpu-box.lan:80"))[0] == 200
        assert (await ask(server, "GET", "/v1/models", Host="evil.example"))[0] == 403


class TestHostsWithKeys:
    """A page without a key gets nothing by any name."""

    @pytest.fixture(params=[(), ("gpu-box.lan",)], ids=["any name", "one name"])
    def config(self, request: pytest.FixtureRequest, ann: tuple[Path, str]) -> dict[str, Any]:
        return {"keys_file": ann[0], "allowed_hosts": request.param}

    async def test_every_name_passes_unless_some_are_given(
        self, server: Server, config: dict[str, Any], ann: tuple[Path, str]
    ) -> None:
        key = f"Bearer {ann[1]}"
        foreign = 403 if config["allowed_hosts"] else 200
        assert (await ask(server, "GET", "/v1/models", Host="gateway:8000", Authorization=key))[0] == foreign
        assert (await ask(server, "GET", "/v1/models", Host="gpu-box.lan", Authorization=key))[0] == 200
        assert (await ask(server, "GET", "/health", Host="127.0.0.1:8000"))[0] == 200

    async def test_a_probe_calls_by_address(
        self, server: Server, config: dict[str, Any], ann: tuple[Path, str]
    ) -> None:
        """An orchestrator does so, since it knows no names. Nothing else is served that way."""
        for path in ("/health", "/live", "/metrics"):
            assert (await ask(server, "GET", path, Host="10.1.2.3:8000"))[0] == 200
        foreign = 403 if config["allowed_hosts"] else 200
        assert (await ask(server, "GET", "/health", Host="evil.example"))[0] == foreign
        asked = {"Host": "10.1.2.3:8000", "Authorization": f"Bearer {ann[1]}"}
        assert (await ask(server, "GET", "/v1/models", **asked))[0] == foreign


class TestOrigins:
    @pytest.fixture
    def config(self, ann: tuple[Path, str]) -> dict[str, Any]:
        return {"keys_file": ann[0], "allowed_origins": (PAGE,)}

    async def test_a_preflight_needs_no_key(self, server: Server) -> None:
        status, body, headers = await ask(server, "OPTIONS", "/v1/chat/completions", **preflight(PAGE))
        assert (status, body) == (204, b"")
        assert headers["Access-Control-Allow-Origin"] == PAGE
        assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in headers["Access-Control-Allow-Methods"]

    async def test_another_page_is_refused(self, server: Server) -> None:
        status, body, headers = await ask(server, "OPTIONS", "/v1/completions", **preflight("https://evil.example"))
        assert (status, shaped(body)["code"]) == (403, "origin_not_allowed")
        assert "Access-Control-Allow-Origin" not in headers

    async def test_every_reply_may_be_read(self, server: Server, ann: tuple[Path, str]) -> None:
        """Refusals and streams too."""
        sent = {"Origin": PAGE, "Authorization": f"Bearer {ann[1]}"}
        for body, status in ((COMPLETION, 200), ({**COMPLETION, "stream": True}, 200), ({**COMPLETION, "n": 0}, 400)):
            async with server.http.post(server.url + "/v1/completions", json=body, headers=sent) as response:
                await response.read()
                assert response.status == status
                assert response.headers["Access-Control-Allow-Origin"] == PAGE
                assert "Greenroom-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        status, _, headers = await ask(server, "GET", "/v1/models", Origin=PAGE)
        assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE)


async def test_off_nothing_is_said_of_origins(server: Server) -> None:
    status, body, headers = await ask(server, "OPTIONS", "/v1/completions", **preflight(PAGE))
    assert (status, shaped(body)["code"]) == (405, "method_not_allowed")
    assert not [name for name in headers if name.startswith("Access-Control") or name == "Vary"]
    assert "Access-Control-Allow-Origin" not in (await ask(server, "GET", "/v1/models", Origin=PAGE))[2]


# -- a real browser --------------------------------------------------------------------------------------------------

_SCRIPT = """
<!doctype html><script>
async function run() {
  const found = {text: ""};
  const leaving = new AbortController();
  try {
    const reply = await fetch("URL/v1/chat/completions", {
      method: "POST",
      signal: leaving.signal,
      headers: {"Content-Type": "application/json", "Authorization": "Bearer KEY", "X-Request-Id": "mine"},
      body: JSON.stringify({model: "org/small", stream: true, store: true,
                            messages: [{role: "user", content: "hello"}]}),
    });
    found.status = reply.status;
    found.id = reply.headers.get("X-Request-Id");
    found.hints = reply.headers.get("Greenroom-Without-Effect");
    const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const lines = (rest + part.value).split("\\n");
      rest = lines.pop();
      for (const line of lines) {
        const word = line.startsWith("data: {") ? JSON.parse(line.slice(6)).choices[0]?.delta.content ?? "" : "";
        if (word && !found.text) await fetch("/first", {method: "POST", body: word});
        found.text += word;
        if (word && LEAVES) leaving.abort();
      }
    }
  } catch (error) { found.error = String(error); }
  await fetch("/found", {method: "POST", body: JSON.stringify(found)});
}
run();
</script>
"""


class Site:
    """A page of another origin, and what it says that it found. ``on_first``: what happens when it has told of the
    first word of an answer; until then it waits."""

    def __init__(self) -> None:
        self.page = ""
        self.on_first: Callable[[], Awaitable[None]] | None = None
        self.found: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        app = web.Application()
        app.router.add_get("/", self._page)
        app.router.add_post("/first", self._first)
        app.router.add_post("/found", self._found)
        self._runner = web.AppRunner(app, access_log=None)

    async def start(self) -> str:
        """The page's origin."""
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://localhost:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(text=self.page, content_type="text/html")

    async def _first(self, request: web.Request) -> web.Response:
        if self.on_first is not None:
            await self.on_first()
        return web.Response()

    async def _found(self, request: web.Request) -> web.Response:
        self.found.set_result(json.loads(await request.text()))
        return web.Response()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
@pytest.mark.timeout(300)
class TestChromium:
    @pytest.fixture
    async def site(self) -> AsyncIterator[tuple[Site, str]]:
        site = Site()
        yield site, await site.start()
        await site.stop()

    @pytest.fixture(params=["allowed", "off"])
    def config(self, request: pytest.FixtureRequest, site: tuple[Site, str], ann: tuple[Path, str]) -> dict[str, Any]:
        return {"keys_file": ann[0], "allowed_origins": (site[1],) if request.param == "allowed" else ()}

    async def test_a_page_of_another_origin(
        self, server: Server, config: dict[str, Any], site: tuple[Site, str], ann: tuple[Path, str]
    ) -> None:
        """It has the first word while the others are not made yet."""
        page, origin = site
        page.page = script(server, ann[1])
        await server.generator.allow(1)
        page.on_first = partial(server.generator.allow, None)
        found = await look_at(origin, page.found)
        if config["allowed_origins"]:
            assert found == {"status": 200, "id": "mine", "hints": "store", "text": TEXT}
        else:
            assert set(found) == {"text", "error"}
            assert "Failed to fetch" in found["error"]
            assert server.generator.seen == []

    @pytest.mark.parametrize("config", ["allowed"], indirect=True)
    async def test_a_page_that_aborts_its_fetch_ends_its_request(
        self, server: Server, site: tuple[Site, str], ann: tuple[Path, str]
    ) -> None:
        page, origin = site
        page.page = script(server, ann[1], leaves=True)
        await server.generator.allow(1)
        found = await look_at(origin, page.found)
        assert "AbortError" in found["error"]
        await server.generator.until_idle()
        assert set(server.generator.outcomes.values()) == {FinishReason.CANCELLED}


def script(server: Server, key: str, *, leaves: bool = False) -> str:
    return _SCRIPT.replace("URL", server.url).replace("KEY", key).replace("LEAVES", "true" if leaves else "false")


async def look_at(url: str, found: asyncio.Future[dict[str, Any]]) -> dict[str, Any]:
    """What the page at ``url`` finds in a browser."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-port=0", url,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(BROWSER_S):
                return await found
        finally:
            browser.terminate()
            await asyncio.wait_for(browser.wait(), DEADLINE_S)
