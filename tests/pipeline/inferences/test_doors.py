"""Inferences behind the same doors as text: keys, limits, sizes, idempotency, cancels, drain, log."""

from __future__ import annotations

import asyncio
import logging
import zlib
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from greenroom.fabric.log import AppendRefused
from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys
from greenroom.worker.inference_engine import InferenceResult
from greenroom.worker.inference_twin import SPOILED, InferenceTwin, twin_card
from tests.pipeline.inferences.conftest import MODEL, Served, body, outputs_of
from tests.pipeline.inferences.images import png
from tests.waiting import DEADLINE_S, until


@pytest.fixture
def twin() -> InferenceTwin:
    return InferenceTwin(twin_card(MODEL), held=True)


async def queued(served: Served, count: int = 1) -> None:
    await until(lambda: served.twin.state().waiting == count, f"{count} wait in the engine")


async def test_a_client_that_leaves_cancels_its_whole_batch(served: Served, twin: InferenceTwin) -> None:
    call = asyncio.create_task(served.post(body([png(tail=b"%d" % n) for n in range(3)])))
    await queued(served, 3)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await until(lambda: len(twin.cancelled) == 3, "all three are cancelled")
    assert twin.state().waiting == 0
    ended = {"model_name": MODEL, "finished_reason": "cancelled"}
    await until(lambda: served.metric("request_success_total", **ended) == 3, "they are counted")


async def test_one_failure_ends_the_batch(served: Served, twin: InferenceTwin) -> None:
    call = asyncio.create_task(served.post(body([png(tail=b"%d" % n) for n in range(9)] + [png(tail=SPOILED)])))
    await queued(served, 10)
    twin.release(batches=2)  # of eight and two
    status, reply, _ = await call
    assert (status, reply) == (400, {"error": "element 9: the image can not be decoded"})


@pytest.mark.parametrize("front", [{"request_timeout_s": 0.3}])
async def test_a_request_that_is_not_finished_in_time(served: Served) -> None:
    status, reply, _ = await served.post(body([png()]))
    assert (status, list(reply)) == (504, ["error"])


async def test_its_own_timeout_is_in_microseconds(served: Served) -> None:
    status, _, _ = await served.post(body([png()], parameters={"timeout": 200_000}))
    assert status == 504


async def test_priority_and_slo_reach_the_engine(served: Served, twin: InferenceTwin) -> None:
    calls = [
        asyncio.create_task(served.post(body([png(tail=b"%d" % n)], component, parameters={"priority": priority})))
        for n, (component, priority) in enumerate((("R0402", 0), ("R0603", 7), ("U7", -3)))
    ]
    headers = {"X-Priority": "9", "X-SLO-E2E-Ms": "100"}
    calls.append(asyncio.create_task(served.post(body([png(tail=b"h")], "R0402"), headers=headers)))
    await queued(served, 4)
    order = [one.parameter for one in sorted(twin._waiting.values(), key=lambda one: -one.priority)]
    assert order == ["R0402", "R0603", "R0402", "U7"]
    twin.release()
    assert [reply[0] for reply in await asyncio.gather(*calls)] == [200] * 4


async def test_slo_in_header_and_parameters_must_agree(served: Served) -> None:
    asked = body([png()], parameters={"slo_e2e_ms": 50})
    status, reply, _ = await served.post(asked, headers={"X-SLO-E2E-Ms": "100"})
    assert status == 400
    assert "differ" in reply["error"]


async def test_an_idempotency_key(served: Served, twin: InferenceTwin) -> None:
    """A retry joins while it runs, and gets the answer afterwards. Another body is a conflict. A client that leaves
    ends nothing."""
    key = {"Idempotency-Key": "k"}
    first = asyncio.create_task(served.post(body([png(tail=b"a"), png(tail=b"b")]), headers=key))
    await queued(served, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(served.post(body([png(tail=b"a"), png(tail=b"b")]), headers=key))
    status, reply, _ = await served.post(body([png(tail=b"c"), png(tail=b"b")]), headers=key)
    assert (status, list(reply)) == (409, ["error"])
    twin.release()
    status, reply, _ = await second
    assert status == 200, reply
    again, repeated, _ = await served.post(body([png(tail=b"a"), png(tail=b"b")]), headers=key)
    assert (again, outputs_of(repeated)) == (200, outputs_of(reply))
    assert sum(map(len, twin.batches)) == 2, "nothing ran twice"


async def test_what_the_engine_has_ended_by_its_deadline_is_expired_for_a_retry_too(
    served: Served, twin: InferenceTwin
) -> None:
    key = {"Idempotency-Key": "k"}
    first = asyncio.create_task(served.post(body([png()]), headers=key))
    await queued(served)
    for one in twin._waiting.values():
        one.on_result(InferenceResult(error="its time was over", expired=True))
    assert (await first)[0] == 504
    status, reply, _ = await served.post(body([png()]), headers=key)
    assert (status, reply) == (504, {"error": "its time was over"})
    assert served.metric("request_success_total", model_name=MODEL, finished_reason="expired") == 2
    assert served.metric("request_success_total", model_name=MODEL, finished_reason="failed") == 0


@pytest.mark.parametrize("front", [{"max_in_flight": 1}])
async def test_a_full_server_is_429_with_retry_after(served: Served, twin: InferenceTwin) -> None:
    first = asyncio.create_task(served.post(body([png()])))
    await queued(served)
    status, reply, headers = await served.post(body([png(tail=b"x")]))
    assert (status, list(reply)) == (429, ["error"])
    assert int(headers["Retry-After"]) >= 1
    twin.release()
    assert (await first)[0] == 200


@pytest.mark.parametrize("front", [{"max_inputs_held_bytes": 1000, "max_input_bytes": 10_000}])
async def test_more_bytes_than_may_be_held_are_429(served: Served, twin: InferenceTwin) -> None:
    first = asyncio.create_task(served.post(body([png(tail=bytes(2000))])))
    await queued(served)
    status, reply, _ = await served.post(body([png()]))
    assert status == 429
    assert "bytes are being answered" in reply["error"]
    twin.release()
    assert (await first)[0] == 200


class Begun:
    """An infer call of which the client has sent the headers, and no more than ``send`` has."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def at(cls, served: Served, *headers: str) -> Begun:
        begun = cls(*await asyncio.open_connection("127.0.0.1", served.gateway.port))
        lines = (f"POST /v2/models/{MODEL}/infer HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
        await begun.send("\r\n".join((*lines, *headers, "", "")).encode())
        return begun

    async def send(self, raw: bytes) -> None:
        self._writer.write(raw)
        await self._writer.drain()

    async def status(self) -> int:
        async with asyncio.timeout(DEADLINE_S):
            return int((await self._reader.readline()).split()[1])

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


def bytes_held(served: Served) -> int:
    return served.gateway._gateway._requests._held.total


@pytest.mark.parametrize("front", [{"max_inputs_held_bytes": 5000, "max_input_bytes": 10_000}])
@pytest.mark.parametrize("header", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
async def test_calls_whose_bodies_do_not_come_keep_no_one_out(served: Served, twin: InferenceTwin, header: str) -> None:
    twin.release()
    idle = [await Begun.at(served, header) for _ in range(4)]
    await until(lambda: served.gateway._gateway._admission.in_flight == 4, "all are read")
    assert (await served.post(body([png()])))[0] == 200
    for one in idle:
        await one.leave()


@pytest.mark.parametrize("front", [{"max_inputs_held_bytes": 30_000, "max_infer_body_bytes": 200_000}])
async def test_a_body_counts_as_what_it_is_once_decompressed(served: Served, twin: InferenceTwin) -> None:
    """While it comes, until its client leaves. One that can not be held is refused before it has come."""
    twin.release()
    packed = zlib.compressobj(wbits=31)
    start = packed.compress(b" " * 40_000) + packed.flush(zlib.Z_SYNC_FLUSH)
    assert len(start) < 1000
    first, second = [await Begun.at(served, "Content-Encoding: gzip", "Content-Length: 1000") for _ in range(2)]
    await first.send(start)
    await until(lambda: bytes_held(served) == 40_000, "alone it may have as many as a body has")
    await second.send(start)
    assert await second.status() == 429
    status, reply, headers = await served.post(body([png()]))
    assert (status, list(reply)) == (429, ["error"])
    assert int(headers["Retry-After"]) >= 1
    for one in (first, second):
        await one.leave()
    await until(lambda: bytes_held(served) == 0, "nothing is held")
    assert (await served.post(body([png()])))[0] == 200


@pytest.mark.parametrize("front", [{"max_inputs_held_bytes": 4200, "max_input_bytes": 10_000}])
async def test_what_goes_on_under_a_key_goes_on_counting(served: Served, twin: InferenceTwin) -> None:
    """Once, however many callers it had, and until it ends."""
    asked, key = body([png(tail=bytes(1000)), png(tail=bytes(500))]), {"Idempotency-Key": "k"}
    inputs = len(png(tail=bytes(1000)) + png(tail=bytes(500)))
    for _ in range(2):
        call = asyncio.create_task(served.post(asked, headers=key))
        await until(lambda: twin.state().waiting == 2 and bytes_held(served) > inputs, "it is read, and joins")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await until(lambda: bytes_held(served) <= inputs, "its call has ended")
        assert bytes_held(served) == inputs
        assert (await served.post(body([png(tail=bytes(2500))])))[0] == 429
    twin.release()
    await until(lambda: bytes_held(served) == 0, "it has ended")
    assert (await served.post(asked, headers=key))[0] == 200


@pytest.mark.parametrize("pool", [{"max_input_bytes": 3000}])
async def test_inputs_that_the_worker_has_no_memory_for_wait(served: Served, twin: InferenceTwin) -> None:
    some = [png(tail=bytes(2000) + b"%d" % n) for n in range(5)]
    calls = [asyncio.create_task(served.post(body([image]))) for image in some]
    await queued(served)
    twin.release()
    assert [reply[0] for reply in await asyncio.gather(*calls)] == [200] * 5
    assert [len(batch) for batch in twin.batches] == [1] * 5, "no two are there at once"


@pytest.mark.parametrize("front", [{"max_infer_body_bytes": 5000, "body_timeout_s": 1.0}])
async def test_bodies_that_are_refused_hold_nothing(served: Served) -> None:
    chunk = b"400\r\n" + bytes(1024) + b"\r\n"
    late, large = [await Begun.at(served, "Transfer-Encoding: chunked") for _ in range(2)]
    await late.send(chunk)
    await large.send(chunk * 5)
    assert await large.status() == 413
    await until(lambda: bytes_held(served) == 1024, "one is held")
    assert await late.status() == 408
    assert bytes_held(served) == 0
    for one in (late, large):
        await one.leave()


@pytest.mark.parametrize("front", [{"max_infer_body_bytes": 5000, "max_input_bytes": 1000}])
async def test_what_is_too_large_is_413(served: Served, twin: InferenceTwin) -> None:
    twin.release()
    for images in ([png(tail=bytes(1000))], [png(tail=bytes(900))] * 9):
        status, reply, _ = await served.post(body(images))
        assert (status, list(reply)) == (413, ["error"])
    assert (await served.post(body([png(tail=bytes(900))])))[0] == 200


async def test_a_record_that_the_log_does_not_take_is_413(served: Served) -> None:
    """The door lets it pass where it is set up for more than the topic."""
    pipeline = served.gateway._gateway._generator
    record: Any = pipeline

    async def refuse(*args: object, **more: object) -> None:
        raise AppendRefused("too large")

    record._log = type("Refusing", (), {"append": staticmethod(refuse)})()
    status, reply, _ = await served.post(body([png()]))
    assert (status, list(reply)) == (413, ["error"])


class TestKeys:
    @pytest.fixture
    def key(self, tmp_path: Path) -> str:
        path = tmp_path / "keys.json"
        made, text = new_key("acme", KeyLimits(max_concurrent=2, max_priority=5), utc_now())
        with changing(path) as present:
            write_keys(path, present.add(made))
        return text

    @pytest.fixture
    def front(self, tmp_path: Path, key: str) -> dict[str, Any]:
        return {"keys_file": tmp_path / "keys.json"}

    async def test_who_may_come_in(self, served: Served, twin: InferenceTwin, key: str) -> None:
        twin.release()
        bearer = {"Authorization": f"Bearer {key}"}
        assert (await served.get("/v2/health/ready"))[0] == 200
        assert (await served.get("/v2/health/live"))[0] == 200
        status, reply, headers = await served.post(body([png()]))
        assert (status, list(reply)) == (401, ["error"])
        assert headers["WWW-Authenticate"].startswith("Bearer")
        assert (await served.get(f"/v2/models/{MODEL}"))[0] == 401
        assert (await served.get(f"/v2/models/{MODEL}", headers=bearer))[0] == 200
        assert (await served.post(body([png()]), headers=bearer))[0] == 200
        status, reply, _ = await served.post(body([png()] * 3), headers=bearer)
        assert status == 400, "a batch of three is more than the key is ever allowed"
        status, reply, _ = await served.post(body([png()], parameters={"priority": 6}), headers=bearer)
        assert status == 400
        assert "at most 5" in reply["error"]


async def test_draining_refuses_and_lets_what_runs_finish(served: Served, twin: InferenceTwin) -> None:
    running = asyncio.create_task(served.post(body([png()])))
    await queued(served)
    drain = asyncio.create_task(served.gateway.drain(10.0))
    await until(lambda: served.gateway.unready is not None, "it drains")
    status, reply, headers = await served.post(body([png(tail=b"late")]))
    assert (status, list(reply), headers["Connection"]) == (503, ["error"], "close")
    assert (await served.get("/v2/health/ready"))[0] == 503
    twin.release()
    assert (await running)[0] == 200
    await drain


async def test_an_engine_that_dies_leaves_its_requests_to_others(served: Served, twin: InferenceTwin) -> None:
    call = asyncio.create_task(served.post(body([png()], parameters={"timeout": 1_000_000})))
    await queued(served)
    twin.die()
    status, _, _ = await call
    assert status == 504, "there is no other worker here"


async def test_a_host_of_another_name_is_refused(served: Served) -> None:
    status, reply, _ = await served.post(body([png()]), headers={"Host": "evil.example"})
    assert (status, list(reply)) == (403, ["error"])


async def test_the_access_log(served: Served, twin: InferenceTwin, caplog: pytest.LogCaptureFixture) -> None:
    twin.release()
    with caplog.at_level(logging.INFO, logger="greenroom.gateway.access"):
        _, _, headers = await served.post(body([png()]), headers={"X-Request-Id": "mine"})
        await served.post(body([png()], "R9"))
        await served.get("/v2/health/live")
        async with aiohttp.ClientSession() as other:  # its end is seen, so the lines are there
            await other.get(f"{served.url}/v2")
    lines = [record.getMessage() for record in caplog.records if record.name == "greenroom.gateway.access"]
    infer = [line for line in lines if "/infer" in line]
    base = headers["Greenroom-Request-Id"]
    assert infer[0].startswith(f"mine POST /v2/models/{MODEL}/infer 200 ")
    assert infer[0].endswith(f"ms id={base}")
    assert infer[1].endswith("error=invalid_value param='parameters.component'")
    assert not [line for line in lines if "/health/" in line]


async def test_metrics(served: Served, twin: InferenceTwin) -> None:
    twin.release()
    await served.post(body([png(tail=b"1"), png(tail=b"2")]))
    ended = {"model_name": MODEL, "finished_reason": "stop"}
    assert served.metric("request_success_total", **ended) == 2
    path = {"path": "/v2/models/{name}/infer", "status": "200"}
    await until(lambda: served.metric("http_requests_total", **path) == 1, "it is counted")
    assert served.metric("e2e_request_latency_seconds_count", model_name=MODEL) == 2
    assert served.metric("generation_tokens_total", model_name=MODEL) == 0
    assert served.metric("num_requests_waiting", model_name=MODEL) == 0
