"""Inferences from the client to the worker's edge and back, over HTTP."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from greenroom.core import bytes_tensors
from greenroom.core.collaboration import InputKind
from greenroom.core.inference import InferenceInput
from greenroom.core.inference_outputs import InferenceOutputs
from greenroom.worker.inference_twin import SPOILED, InferenceTwin, twin_card, twin_outputs
from tests.pipeline.inferences.conftest import MODEL, Served, body, outputs_of
from tests.pipeline.inferences.images import jpeg, png

LENGTH = "Inference-Header-Content-Length"


def said(image: bytes, component: str = "U7") -> InferenceOutputs:
    return twin_outputs((InferenceInput(kind=InputKind.IMAGE, data=image),), component)


def images(count: int) -> list[bytes]:
    return [png(tail=b"%d" % place) for place in range(count)]


def turned(component: str = "U7") -> bytes:
    """An image with a second stage and a box."""
    return next(one for one in images(100) if said(one, component).label == "turned")


def binary(head: dict[str, Any], *tensors: bytes) -> dict[str, Any]:
    """What aiohttp is to send: JSON with tensors in binary form behind it, without a type, as Triton's client does."""
    raw = json.dumps(head).encode()
    return {
        "data": b"".join((raw, *tensors)),
        "headers": {LENGTH: str(len(raw))},
        "skip_auto_headers": ["Content-Type"],
    }


def image_head(tensor: bytes, count: int, **more: Any) -> dict[str, Any]:
    image = {"name": "image", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": len(tensor)}}
    return {"inputs": [image], "parameters": {"component": "U7"}, **more}


async def test_one_image_is_judged(served: Served) -> None:
    image = turned()
    status, reply, headers = await served.post(body([image], id="mine"))
    assert status == 200, reply
    found, expected = outputs_of(reply), said(image)
    assert (reply["model_name"], reply["model_version"], reply["id"]) == (MODEL, "1", "mine")
    assert found["label"] == {"name": "label", "datatype": "BYTES", "shape": [1], "data": [expected.label]}
    assert found["score"]["data"] == [pytest.approx(expected.score)]
    assert found["path"]["data"] == list(expected.path) == ["U7", "orientation"]
    assert found["path"]["shape"] == [1, 2]
    assert found["labels"]["data"] == [label for label, _ in expected.scores]
    assert found["scores"]["data"] == pytest.approx([score for _, score in expected.scores])
    assert (found["boxes"]["shape"], found["boxes"]["data"]) == ([1, 1, 4], [1.0, 2.0, 3.0, 4.0])
    assert (found["box_labels"]["data"], found["box_counts"]["data"]) == (["turned"], [1])
    assert found["embedding"]["data"] == list(struct.unpack("<4f", expected.embedding))
    assert len(headers["Greenroom-Request-Id"]) == 40


async def test_a_batch_is_answered_in_its_order(served: Served, twin: InferenceTwin) -> None:
    some = [*images(30), jpeg(tail=b"j")]
    status, reply, _ = await served.post(body(some))
    assert status == 200, reply
    found = outputs_of(reply)
    assert found["label"]["data"] == [said(image).label for image in some]
    assert found["path"]["shape"] == [31, 2], "shorter ways are filled up"
    rows = [tuple(found["path"]["data"][2 * row : 2 * row + 2]) for row in range(31)]
    assert rows == [(*said(image).path, "")[:2] for image in some]
    assert found["box_counts"]["data"] == [len(said(image).boxes) for image in some]
    assert len({len(batch) for batch in twin.batches}) >= 1
    assert sum(map(len, twin.batches)) == 31


async def test_each_element_may_have_a_router_value_of_its_own(served: Served) -> None:
    some = images(2)
    asked = body(some, component=None)
    asked["inputs"].append({"name": "component", "shape": [2], "datatype": "BYTES", "data": ["R0402", "U7"]})
    status, reply, _ = await served.post(asked)
    assert status == 200, reply
    assert outputs_of(reply)["label"]["data"] == [said(some[0], "R0402").label, said(some[1], "U7").label]


async def test_tensors_in_binary_form_both_ways(served: Served) -> None:
    some = images(3)
    tensor = bytes_tensors.join(some)
    outputs = [
        {"name": "score", "parameters": {"binary_data": True}},
        {"name": "label", "parameters": {"binary_data": False}},
        {"name": "path"},
    ]
    head = image_head(tensor, 3, outputs=outputs)
    head["parameters"]["binary_data_output"] = True
    async with served.http.post(served.infer_url, **binary(head, tensor)) as response:
        raw = await response.read()
        assert response.status == 200, raw
        assert response.content_type == "application/octet-stream"
        size = int(response.headers[LENGTH])
    reply, rest = json.loads(raw[:size]), raw[size:]
    assert [one["name"] for one in reply["outputs"]] == ["score", "label", "path"]
    score, label, path = reply["outputs"]
    assert label["data"] == [said(image).label for image in some]
    assert score["parameters"] == {"binary_data_size": 12}
    assert struct.unpack("<3f", rest[:12]) == pytest.approx([said(image).score for image in some])
    assert len(rest) == 12 + path["parameters"]["binary_data_size"]
    assert len(bytes_tensors.split(rest[12:])) == 3 * path["shape"][1]


async def test_a_timeout_of_0_is_none_of_its_own(served: Served) -> None:
    """As in Triton's protocol."""
    status, reply, _ = await served.post(body(images(1), parameters={"timeout": 0}))
    assert status == 200, reply


async def test_content_type_holds_in_the_binary_form_too(served: Served) -> None:
    (image,) = images(1)
    tensor = bytes_tensors.join([base64.b64encode(image)])
    head = image_head(tensor, 1)
    head["inputs"][0]["parameters"]["content_type"] = "base64"
    async with served.http.post(served.infer_url, **binary(head, tensor)) as response:
        assert response.status == 200, await response.text()


async def test_the_version_in_the_path(served: Served) -> None:
    url = f"{served.url}/v2/models/{MODEL}/versions"
    async with served.http.post(f"{url}/1/infer", json=body(images(1))) as response:
        assert response.status == 200
    async with served.http.post(f"{url}/2/infer", json=body(images(1))) as response:
        assert response.status == 404
        assert "served: 1" in (await response.json())["error"]


async def test_what_the_server_says_of_itself(served: Served) -> None:
    status, server = await served.get("/v2")
    assert (status, server["name"], server["extensions"]) == (200, "greenroom", ["binary_tensor_data"])
    assert await served.get("/v2/health/live") == (200, {"live": True})
    assert await served.get("/v2/health/ready") == (200, {"ready": True})
    for path in (f"/v2/models/{MODEL}", f"/v2/models/{MODEL}/versions/1"):
        assert await served.get(path + "/ready") == (200, {"name": MODEL, "ready": True})
        status, model = await served.get(path)
        assert (status, model["name"], model["versions"]) == (200, MODEL, ["1"])
        assert [one["name"] for one in model["inputs"]] == ["image", "component"]
        assert {"name": "label", "datatype": "BYTES", "shape": [-1]} in model["outputs"]
    status, reply = await served.get("/v2/models/other")
    assert (status, list(reply)) == (404, ["error"])


async def test_the_model_is_listed_and_chat_with_it_names_the_path(served: Served) -> None:
    status, listed = await served.get("/v1/models")
    assert (status, [one["id"] for one in listed["data"]]) == (200, [MODEL])
    assert "max_model_len" not in listed["data"][0]
    for path, asked in (
        ("/v1/chat/completions", {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi"}),
    ):
        async with served.http.post(served.url + path, json=asked) as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"], error["param"]) == (400, "takes_inferences", "model")
            assert f"/v2/models/{MODEL}/infer" in error["message"]


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "no image": (body([b"text, not an image"]), 400, "no PNG or JPEG"),
    "broken head": (body([png()[:20]]), 400, "no PNG or JPEG"),
    "too many pixels": (body([png(2000, 1000)]), 400, "2000 x 1000 pixels; at most 1000000"),
    "gigapixels in some bytes": (body([jpeg(65_535, 65_535)]), 400, "pixels"),
    "unknown component": (body(images(1), "R0412"), 400, "near it: R0402"),
    "component missing": (body(images(1), None), 400, "'component' is missing"),
    "component of another type": (body(images(1), parameters={"component": True}), 400, "is a string"),
    "unknown parameter": (body(images(1), parameters={"sequence_id": 4}), 400, "no parameter is called 'sequence_id'"),
    "unknown input": (
        {"inputs": [{"name": "pixels", "shape": [1], "datatype": "BYTES", "data": ["x"]}]},
        400,
        "known: image, component",
    ),
    "no input": ({"inputs": [], "parameters": {"component": "U7"}}, 400, "'image' is missing"),
    "an empty batch": (body([]), 400, "1 to 128 elements"),
    "a batch too large": (body(images(129)), 400, "1 to 128 elements, not 129"),
    "another datatype": (
        {"inputs": [{"name": "image", "shape": [1], "datatype": "FP32", "data": ["x"]}]},
        400,
        "datatype 'FP32'",
    ),
    "a shape that does not fit": (
        {"inputs": [{"name": "image", "shape": [2], "datatype": "BYTES", "data": ["x"]}]},
        400,
        "stands for 2 elements, and 1 came",
    ),
    "no base64": (
        {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["%"],
                     "parameters": {"content_type": "base64"}}]},
        400,
        "not base64",
    ),
    "unknown content_type": (
        {"inputs": [{"name": "image", "shape": [1], "datatype": "BYTES", "data": ["x"],
                     "parameters": {"content_type": "np"}}]},
        400,
        "content_type is base64, or left out where elements are sent as they are; not 'np'",
    ),
    "outputs neither binary nor not": (
        body(images(1), parameters={"binary_data_output": 1}),
        400,
        "binary_data_output is true or false",
    ),
    "negative timeout": (body(images(1), parameters={"timeout": -1}), 400, "timeout must be above 0"),
    "unknown output": (body(images(1), outputs=[{"name": "colour"}]), 400, "no output is called 'colour'"),
    "classification": (
        body(images(1), outputs=[{"name": "label", "parameters": {"classification": 3}}]),
        400,
        "classification extension is not supported",
    ),
    "unknown field": ({**body(images(1)), "stream": True}, 400, "unknown field: stream"),
    "another model in the body": (body(images(1), model_name="other"), 400, "model_name and the path differ"),
    "priority too high": (body(images(1), parameters={"priority": 101}), 400, "priority must be from -100 to 100"),
    "timeout too long": (body(images(1), parameters={"timeout": 10**10}), 400, "at most 3600 seconds"),
    "timeout of 400 digits": (body(images(1), parameters={"timeout": 10**400}), 400, "timeout is a finite number"),
    "slo of 400 digits": (body(images(1), parameters={"slo_e2e_ms": 10**400}), 400, "slo_e2e_ms is a finite number"),
    "numbers in JSON": (
        {"inputs": [{"name": "image", "shape": [1, 3], "datatype": "FP32", "data": [[0.5, 0.5, 0.5]]}]},
        400,
        "has the datatype 'FP32'; send BYTES",
    ),
    "spoiled image": (body([png(tail=SPOILED)]), 400, "can not be decoded"),
    "spoiled image among others": (body([png(), png(tail=SPOILED), png()]), 400, "element 1: the image can not be"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_its_reason(served: Served, name: str) -> None:
    asked, expected, reason = BAD[name]
    status, reply, _ = await served.post(asked)
    assert (status, list(reply)) == (expected, ["error"]), reply
    assert reason in reply["error"]


async def test_bodies_that_are_no_infer_call(served: Served) -> None:
    tensor = bytes_tensors.join(images(1))
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"data": b"{", "headers": {"Content-Type": "application/json"}}, 400, "not valid JSON"),
        ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "as JSON"),
        (
            {"data": b"{}", "headers": {"Origin": "http://a.example"}, "skip_auto_headers": ["Content-Type"]},
            415,
            "JSON",
        ),
        ({"data": b"{}", "headers": {LENGTH: "9"}}, 400, "says 9 bytes of JSON, and the body has 2"),
        ({"data": b"{}", "headers": {LENGTH: "x"}}, 400, "takes a number of bytes"),
        (binary(image_head(tensor, 1), tensor + b"more"), 400, "4 bytes behind the JSON belong to no input"),
        (binary(image_head(tensor, 1), tensor[:-1]), 400, "by its binary_data_size"),
        (binary(image_head(tensor[:-1], 1), tensor[:-1]), 400, "can not be read: element 0"),
    ]
    for sent, expected, reason in cases:
        async with served.http.post(served.infer_url, **sent) as response:
            assert (response.status, response.content_type) == (expected, "application/json"), reason
            assert reason in (await response.json())["error"]


async def test_an_unknown_model_and_an_unknown_path(served: Served) -> None:
    async with served.http.post(f"{served.url}/v2/models/other/infer", json=body(images(1))) as response:
        assert response.status == 404
        assert f"served: {MODEL}" in (await response.json())["error"]
    async with served.http.get(f"{served.url}/v2/repository/index") as response:
        assert (response.status, list(await response.json())) == (404, ["error"])
    async with served.http.get(served.infer_url) as response:
        assert (response.status, response.headers["Allow"]) == (405, "POST")


class TestNameWithSlashes:
    @pytest.fixture
    def twin(self) -> InferenceTwin:
        return InferenceTwin(twin_card("org/board"))

    async def test_it_is_found_at_every_path(self, served: Served) -> None:
        url = f"{served.url}/v2/models/org/board"
        for path in (url, f"{url}/ready", f"{url}/versions/1", f"{url}/versions/1/ready"):
            async with served.http.get(path) as response:
                assert (await response.json())["name"] == "org/board", path
        async with served.http.post(f"{url}/versions/1/infer", json=body(images(1))) as response:
            assert response.status == 200
        async with served.http.post(f"{url}/infer", json=body(images(1), model_name="org/board")) as response:
            assert response.status == 200
