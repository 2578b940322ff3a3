"""Inferences from the client to the worker's edge and back, over HTTP."""

from __future__ import annotations

import pytest

from greenroom.core.collaboration import InputKind
from greenroom.core.inference import InferenceInput
from greenroom.worker.inference_twin import twin_outputs
from tests.pipeline.inferences.conftest import MODEL, Served, body, outputs_of
from tests.pipeline.inferences.images import png


def said(image: bytes, component: str = "U7"):  # type: ignore[no-untyped-def]
    return twin_outputs((InferenceInput(kind=InputKind.IMAGE, data=image),), component)


async def test_one_image_is_judged(served: Served) -> None:
    image = png(tail=b"one")
    status, reply, headers = await served.post(body([image], id="mine"))
    assert status == 200, reply
    found, expected = outputs_of(reply), said(image)
    assert (reply["model_name"], reply["id"]) == (MODEL, "mine")
    assert found["label"]["data"] == [expected.label]
    assert found["score"]["data"] == [pytest.approx(expected.score)]
    assert found["path"]["data"] == list(expected.path)
    assert headers["Greenroom-Request-Id"]
