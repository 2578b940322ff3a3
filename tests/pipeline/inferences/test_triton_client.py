"""Triton's own client, as it is installed, and curl: against all services in this process.

The client lives in .venv-clients (`make test-clients`), since its stubs and ours have the same names.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.inferences.conftest import MODEL, Served, body
from tests.pipeline.inferences.test_infer import images, said

CLIENTS = Path(__file__).parents[3] / ".venv-clients"
CALLS = Path(__file__).parents[2] / "clients" / "triton_calls.py"
COUNT = 5
DEADLINE_S = 120


async def printed(*command: str) -> str:
    """What it prints. It ends with the test."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    running = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=environment
    )
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, err = await running.communicate()
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()
    assert running.returncode == 0, err.decode()[-4000:]
    return out.decode()


def written(folder: Path, some: list[bytes]) -> list[str]:
    paths = [folder / f"{place}.png" for place in range(len(some))]
    for path, image in zip(paths, some, strict=True):
        path.write_bytes(image)
    return [str(path) for path in paths]


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    not list(CLIENTS.glob("lib/python*/site-packages/tritonclient")),
    reason="tritonclient is not set up: make test-clients",
)
async def test_triton_s_client(served: Served, tmp_path: Path) -> None:
    some = images(COUNT)
    files = written(tmp_path, some)
    http = served.url.removeprefix("http://")
    python = str(CLIENTS / "bin" / "python")
    found: dict[str, Any] = json.loads(
        await printed(python, str(CALLS), http, served.grpc_address, MODEL, "component", "U7", *files)
    )
    labels = [said(image).label for image in some]
    boxes = max(len(said(image).boxes) for image in some)
    for transport, status in (("http", ("400", "404")), ("grpc", ("INVALID_ARGUMENT", "NOT_FOUND"))):
        told = found[transport]
        assert (told["live"], told["ready"], told["model_ready"], told["server"]) == (True, True, True, "greenroom")
        assert told["inputs"] == ["image", "component"]
        assert told["label"] == told["some"] == labels
        assert told["score"] == pytest.approx([said(image).score for image in some])
        assert (told["path"][0], told["boxes"], told["embedding"]) == (COUNT, [COUNT, boxes, 4], [COUNT, 4])
        assert status[0] in told["no_image"]
        assert "no PNG or JPEG" in told["no_image"]
        assert status[1] in told["unknown_model"]
        assert "classification extension" in told["classification"]
    assert found["http_aio"] == found["grpc_aio"] == found["compressed"] == labels
    assert "no PNG or JPEG" in found["in_json"], "JSON without a content type is taken from what is no page"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_curl(served: Served, tmp_path: Path) -> None:
    (image,) = images(1)
    asked = tmp_path / "asked.json"
    asked.write_text(json.dumps(body([image], outputs=[{"name": "label"}])))
    json_type = ("-H", "Content-Type: application/json")
    reply = json.loads(await printed("curl", "-sS", *json_type, "-d", f"@{asked}", served.infer_url))
    assert [one["data"] for one in reply["outputs"]] == [[said(image).label]]
