"""What Triton's own client gets from a server, over HTTP and gRPC: JSON for the test that runs this with its Python.

python triton_calls.py HOST:HTTP_PORT HOST:GRPC_PORT MODEL PARAMETER VALUE FILE...
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as over_grpc  # type: ignore[import-not-found]
import tritonclient.grpc.aio as over_grpc_aio  # type: ignore[import-not-found]
import tritonclient.http as over_http  # type: ignore[import-not-found]
import tritonclient.http.aio as over_http_aio  # type: ignore[import-not-found]
from tritonclient.utils import InferenceServerException  # type: ignore[import-not-found]


def batch(module: Any, images: list[bytes], **more: Any) -> Any:
    tensor = module.InferInput("image", [len(images)], "BYTES")
    tensor.set_data_from_numpy(np.array(images, dtype=np.object_), **more)
    return tensor


def values(result: Any, name: str) -> list[Any]:
    found = result.as_numpy(name)
    return [one.decode() if isinstance(one, bytes) else one for one in found.reshape(-1).tolist()]


def told(module: Any, client: Any, model: str, parameters: dict[str, Any], images: list[bytes]) -> dict[str, Any]:
    """Everything, with the client that waits."""
    everything = client.infer(model, [batch(module, images)], request_id="mine", parameters=parameters)
    some = client.infer(
        model, [batch(module, images)], parameters=parameters, outputs=[module.InferRequestedOutput("label")],
        model_version="1", timeout=60_000_000, priority=3,
    )  # fmt: skip
    metadata = client.get_model_metadata(model)
    told: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready(model),
        "other_ready": _refused(lambda: client.is_model_ready("other")),
        "server": metadata_of(client.get_server_metadata())["name"],
        "inputs": [one["name"] for one in metadata_of(metadata)["inputs"]],
        "label": values(everything, "label"),
        "score": values(everything, "score"),
        "path": everything.as_numpy("path").shape,
        "boxes": everything.as_numpy("boxes").shape,
        "embedding": everything.as_numpy("embedding").shape,
        "some": values(some, "label"),
        "no_image": _refused(lambda: client.infer(model, [batch(module, [b"text"])], parameters=parameters)),
        "unknown_model": _refused(lambda: client.infer("other", [batch(module, images)], parameters=parameters)),
        "classification": _refused(
            lambda: client.infer(
                model, [batch(module, images)], parameters=parameters,
                outputs=[module.InferRequestedOutput("label", class_count=2)],
            )
        ),
    }  # fmt: skip
    return told


def metadata_of(given: Any) -> Any:
    if isinstance(given, dict):
        return given
    from google.protobuf.json_format import MessageToDict

    return MessageToDict(given)


def _refused(call: Any) -> str:
    try:
        return f"no: {call()}"
    except InferenceServerException as error:
        return f"{error.status()} {error.message()}"


async def side_by_side(module: Any, address: str, model: str, parameters: dict[str, Any], images: list[bytes]) -> Any:
    """A call for each image, all at once, with the client for asyncio."""
    async with module.InferenceServerClient(address) as client:
        calls = [client.infer(model, [batch(module, [image])], parameters=parameters) for image in images]
        return [values(result, "label")[0] for result in await asyncio.gather(*calls)]


def main() -> None:
    http, grpc, model, parameter, value, *files = sys.argv[1:]
    images, parameters = [Path(file).read_bytes() for file in files], {parameter: value}
    texts = over_http.InferenceServerClient(http)
    found = {
        "http": told(over_http, texts, model, parameters, images),
        "grpc": told(over_grpc, over_grpc.InferenceServerClient(grpc), model, parameters, images),
        "http_aio": asyncio.run(side_by_side(over_http_aio, http, model, parameters, images)),
        "grpc_aio": asyncio.run(side_by_side(over_grpc_aio, grpc, model, parameters, images)),
        "compressed": values(
            texts.infer(model, [batch(over_http, images)], parameters=parameters, request_compression_algorithm="gzip"),
            "label",
        ),
        "in_json": _refused(
            lambda: texts.infer(model, [batch(over_http, [b"a text"], binary_data=False)], parameters=parameters)
        ),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
