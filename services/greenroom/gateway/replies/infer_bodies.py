"""What /v2 answers, as it is written: the Open Inference Protocol's objects."""

from __future__ import annotations

from msgspec import UNSET, Struct, UnsetType


class InferErrorBody(Struct, kw_only=True):
    """What is answered below /v2 instead of a reply."""

    error: str


class Live(Struct, kw_only=True):
    live: bool


class Ready(Struct, kw_only=True):
    ready: bool


class ServerMetadata(Struct, kw_only=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Struct, kw_only=True):
    """``shape``: -1 where any size goes."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Struct, kw_only=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ModelReady(Struct, kw_only=True):
    name: str
    ready: bool


class OutputBody(Struct, kw_only=True):
    """A tensor, row by row. Of one in binary form ``parameters`` have ``binary_data_size``, and its bytes are behind
    the JSON."""

    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, int] | UnsetType = UNSET
    data: list[str | float] | UnsetType = UNSET


class InferReply(Struct, kw_only=True):
    model_name: str
    model_version: str
    id: str | UnsetType = UNSET
    outputs: list[OutputBody]


INFER_REPLIES = (InferReply, ServerMetadata, ModelMetadata, ModelReady, Live, Ready, InferErrorBody)
