"""What both transports say of the server and its model, in the Open Inference Protocol's terms."""

from __future__ import annotations

import functools
import importlib.metadata

from greenroom.core.collaboration import CollaborationCard
from greenroom.core.generation import ServedModel
from greenroom.gateway.errors import ApiError
from greenroom.gateway.replies.output_tensors import TensorKind, tensors_of
from greenroom.gateway.requests.inferences.infer_call import BYTES

SERVER = "greenroom"
EXTENSIONS = ("binary_tensor_data",)
PLATFORM = "greenroom_coe"
VERSION = "1"


@functools.cache  # finding it reads a file
def server_version() -> str:
    return importlib.metadata.version("greenroom")


def check_version(version: str) -> None:
    """Raises ApiError (404). Empty: any."""
    if version not in ("", VERSION):
        message = f"the model has no version {version!r:.80} here; served: {VERSION}"
        raise ApiError(404, message, code="model_not_found", param="version")


def inputs_of(card: CollaborationCard) -> list[TensorKind]:
    """What a call may send: a tensor for each kind of input, and the router's values where they come as a tensor."""
    names = [kind.value for kind in card.takes] + ([card.parameter] if card.parameter else [])
    return [TensorKind(name, BYTES, (-1,)) for name in names]


def outputs_of(model: ServedModel) -> list[TensorKind]:
    return [] if model.collaboration is None else tensors_of(model.collaboration)
