"""A call of ModelInfer as both transports read it."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from greenroom.core.errors import InvalidRequest

ParameterValue = str | int | float | bool
BYTES = "BYTES"
CONTENT_TYPE = "content_type"
BINARY_OUTPUT = "binary_data_output"
_BASE64 = "base64"
MAX_ID = 1024
MAX_TENSORS = 16
MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class InputTensor:
    """One input of the batch. ``elements``: row by row, as many as ``shape`` says."""

    name: str
    shape: tuple[int, ...]
    elements: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AskedOutput:
    """An output tensor that the client wants. ``binary``: in binary form; None: as the call says for all."""

    name: str
    binary: bool | None = None


@dataclass(frozen=True, slots=True)
class InferCall:
    """``outputs``: empty: all. ``binary``: outputs are wanted in binary form, unless one says otherwise. ``model``,
    ``version``: what the body says beside the path, None where it does not."""

    inputs: tuple[InputTensor, ...]
    outputs: tuple[AskedOutput, ...] = ()
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    id: str = ""
    binary: bool = False
    model: str | None = None
    version: str | None = None


def binary_output(parameters: Mapping[str, ParameterValue]) -> bool | None:
    """What a call says of the form of all its outputs, None where it says nothing. Raises InvalidRequest."""
    value = parameters.get(BINARY_OUTPUT)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(
            f"{BINARY_OUTPUT} is true or false", param=f"parameters.{BINARY_OUTPUT}", code="invalid_type"
        )
    return value


def decoded(elements: Sequence[bytes], parameters: Mapping[str, ParameterValue], where: str) -> list[bytes]:
    """The elements of an input that has these parameters: out of base64 where ``content_type`` says so.

    ``where``: the input. Raises InvalidRequest, also for any other ``content_type``.
    """
    kind = parameters.get(CONTENT_TYPE)
    if kind is None:
        return list(elements)
    if kind != _BASE64:
        raise InvalidRequest(
            f"content_type is base64, or left out where elements are sent as they are; not {kind!r:.80}",
            param=f"{where}.parameters.{CONTENT_TYPE}",
        )
    try:
        return [base64.b64decode(one, validate=True) for one in elements]
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"data is not base64, as content_type says: {error}", param=f"{where}.data") from error


def count_of(name: str, datatype: str, shape: Sequence[int], most: int) -> int:
    """How many elements an input has by its shape. To be called before they are looked at: there may be millions.

    ``most``: of a batch. Raises InvalidRequest, naming the input.
    """
    if datatype != BYTES:
        raise InvalidRequest(
            f"the input {name!r} has the datatype {datatype!r:.40}; send BYTES, an element for each file or text",
            param=f"inputs.{name}.datatype",
        )
    if len(shape) > MAX_DIMENSIONS:  # before they are multiplied: thousands of them are hours of work
        raise InvalidRequest(
            f"the shape of {name!r:.80} has {len(shape)} dimensions; send [N], or [N, 1], for a batch of N",
            param=f"inputs.{name:.64}.shape",
        )
    size = 1
    for length in shape:
        if length < 0:
            raise InvalidRequest(f"the shape of {name!r} has the negative size {length}", param=f"inputs.{name}.shape")
        size *= min(length, most + 1)  # numbers of JSON may have any number of digits
    if size > most:
        told = str(max(shape)) if len(shape) == 1 else f"those of the shape {list(shape)}"
        raise InvalidRequest(f"a batch has 1 to {most} elements, not {told:.100}", param=f"inputs.{name}.shape")
    return size


def check_came(name: str, shape: Sequence[int], size: int, came: int) -> None:
    """Raises InvalidRequest where ``came`` elements are not the ``size`` of the shape."""
    if size != came:
        raise InvalidRequest(
            f"the shape {list(shape)} of {name!r} stands for {size} elements, and {came} came",
            param=f"inputs.{name}.shape",
        )


def checked_output(name: str, parameters: Mapping[str, ParameterValue]) -> AskedOutput:
    """Raises InvalidRequest, naming the parameter."""
    binary = None
    for key, value in parameters.items():
        where = f"outputs.{name}.parameters.{key}"
        if key == "classification":
            raise InvalidRequest(
                "the classification extension is not supported: ask for the outputs labels and scores",
                param=where,
                code="unsupported_field",
            )
        if key != "binary_data":
            raise InvalidRequest(f"{key!r} is not known as a parameter of an output", param=where, code="unknown_field")
        if not isinstance(value, bool):
            raise InvalidRequest("binary_data is true or false", param=where, code="invalid_type")
        binary = value
    return AskedOutput(name, binary)
