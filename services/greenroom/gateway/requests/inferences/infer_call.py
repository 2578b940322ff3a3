"""A call of ModelInfer as both transports read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from greenroom.core.errors import InvalidRequest

ParameterValue = str | int | float | bool
BYTES = "BYTES"
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


def checked_tensor(name: str, datatype: str, shape: tuple[int, ...], elements: list[bytes]) -> InputTensor:
    """Raises InvalidRequest, naming the input."""
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
        size *= length
    if size != len(elements):
        raise InvalidRequest(
            f"the shape {list(shape)} of {name!r} stands for {size} elements, and {len(elements)} came",
            param=f"inputs.{name}.shape",
        )
    return InputTensor(name, shape, tuple(elements))


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
