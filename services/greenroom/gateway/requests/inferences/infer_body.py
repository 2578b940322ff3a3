"""The body of an infer call over HTTP: JSON, and behind it tensors in binary form (Triton's extension for that)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from greenroom.core import bytes_tensors
from greenroom.core.errors import InvalidRequest
from greenroom.gateway.requests.bodies import not_valid
from greenroom.gateway.requests.inferences.infer_call import (
    BINARY_OUTPUT,
    CONTENT_TYPE,
    MAX_ID,
    MAX_TENSORS,
    InferCall,
    InputTensor,
    ParameterValue,
    binary_output,
    check_came,
    checked_output,
    count_of,
    decoded,
)
from greenroom.gateway.requests.inferences.json_values import has_more_values

_DEEPEST = 8
_FIELDS = 64
"""So many values a tensor may have beside its elements."""


class TensorBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """``data``: strings, flat or nested as the shape is. Left out where ``parameters`` have ``binary_data_size``."""

    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, ParameterValue] = {}
    data: list[Any] | None = None


class OutputBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    parameters: dict[str, ParameterValue] = {}


class InferBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """POST /v2/models/NAME/infer."""

    inputs: list[TensorBody]
    outputs: list[OutputBody] = []
    parameters: dict[str, ParameterValue] = {}
    id: str = ""
    model_name: str | None = None
    model_version: str | None = None


_DECODER = msgspec.json.Decoder(InferBody)


def decode_infer(raw: bytes, json_bytes: int | None, most: int) -> InferCall:
    """``json_bytes``: the header Inference-Header-Content-Length, None where it was not sent. ``most``: elements of a
    batch. Raises InvalidRequest. What is decoded takes memory by ``most`` and the bytes of the body, not by how small
    its elements are."""
    if json_bytes is not None and json_bytes > len(raw):
        raise InvalidRequest(
            f"Inference-Header-Content-Length says {json_bytes} bytes of JSON, and the body has {len(raw)}",
            param="inference-header-content-length",
        )
    head, binary = (raw, b"") if json_bytes is None else (raw[:json_bytes], raw[json_bytes:])
    values = MAX_TENSORS * (most * _DEEPEST + _FIELDS)
    if has_more_values(head, values):
        raise InvalidRequest(
            f"the JSON has more than {values} values: a batch has 1 to {most} elements, and each input one element of "
            "the datatype BYTES for each file or text",
            param="inputs",
        )
    try:
        body = _DECODER.decode(head)
    except msgspec.ValidationError as error:
        raise not_valid(head, InferBody, str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    return _call_of(body, binary, most)


def _call_of(body: InferBody, binary: bytes, most: int) -> InferCall:
    if len(body.id) > MAX_ID:
        raise InvalidRequest(f"id has at most {MAX_ID} characters", param="id")
    for field, some in (("inputs", len(body.inputs)), ("outputs", len(body.outputs))):
        if some > MAX_TENSORS:
            raise InvalidRequest(f"{field} has {some} tensors; at most {MAX_TENSORS} are allowed", param=field)
    at = 0
    tensors = []
    for tensor in body.inputs:
        size = _binary_size(tensor)
        part = binary[at : at + size]
        if len(part) < size:
            raise InvalidRequest(
                f"the input {tensor.name!r} has {size} bytes by its binary_data_size, and {len(part)} are left",
                param=f"inputs.{tensor.name}.parameters.binary_data_size",
            )
        at += size
        tensors.append(_tensor(tensor, part, most))
    if at < len(binary):
        raise InvalidRequest(f"{len(binary) - at} bytes behind the JSON belong to no input", param="inputs")
    wants_binary = binary_output(body.parameters) or False
    parameters = {name: value for name, value in body.parameters.items() if name != BINARY_OUTPUT}
    outputs = tuple(checked_output(one.name, one.parameters) for one in body.outputs)
    return InferCall(tuple(tensors), outputs, parameters, body.id, wants_binary, body.model_name, body.model_version)


def _binary_size(tensor: TensorBody) -> int:
    """0 where its elements are in the JSON."""
    given = tensor.parameters.get("binary_data_size")
    if given is None:
        return 0
    where = f"inputs.{tensor.name}.parameters.binary_data_size"
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise InvalidRequest("binary_data_size is a number of bytes", param=where, code="invalid_type")
    if tensor.data is not None:
        raise InvalidRequest(f"the input {tensor.name!r} has data and binary_data_size; send one of them", param=where)
    return given


def _tensor(tensor: TensorBody, binary: bytes, most: int) -> InputTensor:
    where = f"inputs.{tensor.name}"
    unknown = tensor.parameters.keys() - {"binary_data_size", CONTENT_TYPE}
    if unknown:
        name = min(unknown)
        raise InvalidRequest(
            f"{name!r} is not known as a parameter of an input",
            param=f"{where}.parameters.{name}",
            code="unknown_field",
        )
    count = count_of(tensor.name, tensor.datatype, tensor.shape, most)
    if "binary_data_size" in tensor.parameters:
        try:
            elements = bytes_tensors.split(binary, count)
        except ValueError as error:
            raise InvalidRequest(f"the input {tensor.name!r} can not be read: {error}", param=where) from error
    elif tensor.data is None:
        raise InvalidRequest(f"the input {tensor.name!r} has no data", param=f"{where}.data", code="missing_field")
    else:
        elements = [_element(one, f"{where}.data") for one in _flat(tensor.data, f"{where}.data")]
    check_came(tensor.name, tensor.shape, count, len(elements))
    return InputTensor(tensor.name, tuple(tensor.shape), tuple(decoded(elements, tensor.parameters, where)))


def _flat(data: list[Any], where: str, depth: int = 0) -> Iterator[Any]:
    if depth > _DEEPEST:
        raise InvalidRequest("data is nested too deeply", param=where)
    for one in data:
        if isinstance(one, list):
            yield from _flat(one, where, depth + 1)
        else:
            yield one


def _element(one: Any, where: str) -> bytes:
    if not isinstance(one, str):
        raise InvalidRequest("data of the datatype BYTES is strings", param=where, code="invalid_type")
    return one.encode()
