"""From the tensors of a call to the inferences of its batch. No I/O."""

from __future__ import annotations

import difflib
import functools
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from greenroom.core.collaboration import CALL_PARAMETERS, CollaborationCard, InputKind
from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import ServedModel, Slo
from greenroom.core.inference import InferenceInput, InferenceRequest
from greenroom.core.messages.inferences import MAX_PARAMETER
from greenroom.gateway.config import GatewayConfig
from greenroom.gateway.errors import too_large
from greenroom.gateway.replies.inference_results import InferenceJob
from greenroom.gateway.replies.output_tensors import chosen
from greenroom.gateway.requests.bodies import SloBody
from greenroom.gateway.requests.call_headers import CallHeaders
from greenroom.gateway.requests.inferences.image_size import image_size
from greenroom.gateway.requests.inferences.infer_call import InferCall, InputTensor, ParameterValue
from greenroom.gateway.requests.slo_priority_timeout import priority_of, slo_of, timeout_of

_NEAR = 3
_COMPARED = 4096
"""So many known values are looked at for near ones."""
_FEW = 12


@dataclass(frozen=True, slots=True)
class PreparedInferences:
    """A batch that is ready to run. ``outputs``: the names of the tensors that are wanted, in order. ``timeout_s``:
    from the call's arrival to its end."""

    jobs: tuple[InferenceJob, ...]
    outputs: tuple[str, ...]
    timeout_s: float


class _Urgency(msgspec.Struct, frozen=True):
    """What the call's parameters say, in the fields that a text's body has."""

    slo: SloBody | None
    priority: int | None
    timeout: float | None


def prepare_inferences(
    asked: InferCall, model: ServedModel, card: CollaborationCard, *, call: CallHeaders, config: GatewayConfig
) -> PreparedInferences:
    """Raises InvalidRequest, naming the input or parameter; ApiError (413)."""
    outputs = chosen([one.name for one in asked.outputs], card)
    tensors = _by_name(asked.inputs, card)
    count = _batch(tensors.values(), config)
    values = _router_values(asked.parameters, tensors, card, count)
    urgency = _urgency(asked.parameters, card)
    slo, priority = slo_of(urgency, call), priority_of(urgency, call)
    timeout_s = timeout_of(urgency, call, config)
    inputs = [
        tuple(_checked(kind, tensors[kind.value].elements[place], place, card) for kind in card.takes)
        for place in range(count)
    ]
    for one in inputs:
        if sum(len(part.data) for part in one) > config.max_input_bytes:
            raise too_large(config.max_input_bytes, "the inputs of one request are")
    digest = _digest(model.name, inputs, values, slo, priority) if call.keyed else b""
    jobs = [
        InferenceJob(
            place,
            InferenceRequest(
                request_id=f"{call.base}-{place}",
                inputs=inputs[place],
                parameter=values[place],
                tenant=call.caller.name,
                keyed=call.keyed,
                digest=digest,
                slo=slo,
                priority=priority,
                timeout_s=timeout_s,
            ),
            count,
        )
        for place in range(count)
    ]
    return PreparedInferences(tuple(jobs), outputs, timeout_s)


def _by_name(tensors: Sequence[InputTensor], card: CollaborationCard) -> Mapping[str, InputTensor]:
    known = [kind.value for kind in card.takes] + ([card.parameter] if card.parameter else [])
    found: dict[str, InputTensor] = {}
    for tensor in tensors:
        if tensor.name not in known:
            message = f"no input is called {tensor.name!r:.80} here; known: {', '.join(known)}"
            raise InvalidRequest(message, param="inputs", code="unknown_field")
        if tensor.name in found:
            raise InvalidRequest(f"the input {tensor.name!r} was sent twice", param=f"inputs.{tensor.name}")
        found[tensor.name] = tensor
    for kind in card.takes:
        if kind.value not in found:
            message = f"the input {kind.value!r} is missing"
            raise InvalidRequest(message, param=f"inputs.{kind.value}", code="missing_field")
    return found


def _batch(tensors: Iterable[InputTensor], config: GatewayConfig) -> int:
    """How many requests the call is: the first dimension of every input."""
    counts: set[int] = set()
    for tensor in tensors:
        if not tensor.shape or len(tensor.elements) != tensor.shape[0]:
            raise InvalidRequest(
                f"the input {tensor.name!r} has the shape {list(tensor.shape)}; send [N], or [N, 1], for a batch of N",
                param=f"inputs.{tensor.name}.shape",
            )
        counts.add(tensor.shape[0])
    if len(counts) > 1:
        raise InvalidRequest(f"the inputs have batches of {sorted(counts)}; send one size", param="inputs")
    count = counts.pop()
    if not 1 <= count <= config.max_choices:
        raise InvalidRequest(f"a batch has 1 to {config.max_choices} elements, not {count}", param="inputs")
    return count


def _router_values(
    parameters: Mapping[str, ParameterValue],
    tensors: Mapping[str, InputTensor],
    card: CollaborationCard,
    count: int,
) -> list[str | None]:
    """The router's value for each element: one for all from the parameters, or a tensor of its name."""
    name = card.parameter
    if not name:
        return [None] * count
    given, tensor = parameters.get(name), tensors.get(name)
    where = f"parameters.{name}" if tensor is None else f"inputs.{name}"
    if given is not None and tensor is not None:
        raise InvalidRequest(f"{name} was sent as a parameter and as an input; send one of them", param=where)
    if tensor is not None:
        values = [_decoded(element, name, where) for element in tensor.elements]
    elif given is None:
        message = f"the parameter {name!r} is missing: it says which expert comes first{_known_values(card)}"
        raise InvalidRequest(message, param=where, code="missing_field")
    elif isinstance(given, bool | float):
        raise InvalidRequest(f"the parameter {name!r} is a string", param=where, code="invalid_type")
    else:
        values = [str(given)] * count
    for value in values:
        _check_value(value, card, where)
    return list(values)


def _check_value(value: str, card: CollaborationCard, where: str) -> None:
    if card.values and value not in _set_of(card):
        near = difflib.get_close_matches(value, card.values[:_COMPARED], n=_NEAR, cutoff=0.5)
        hint = f"; near it: {', '.join(near)}" if near else _known_values(card)
        raise InvalidRequest(f"{card.parameter} {value!r:.80} is not known here{hint}", param=where)
    if not 1 <= len(value) <= MAX_PARAMETER:
        raise InvalidRequest(f"{card.parameter} has 1 to {MAX_PARAMETER} characters", param=where)


def _known_values(card: CollaborationCard) -> str:
    if not card.values:
        return ""
    more = f" and {len(card.values) - _FEW} more" if len(card.values) > _FEW else ""
    return f"; known: {', '.join(card.values[:_FEW])}{more}"


@functools.lru_cache(maxsize=8)
def _set_of(card: CollaborationCard) -> frozenset[str]:
    return frozenset(card.values)


def _decoded(element: bytes, name: str, where: str) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"an element of {name!r} is not UTF-8", param=where) from error


def _urgency(parameters: Mapping[str, ParameterValue], card: CollaborationCard) -> _Urgency:
    known = {*CALL_PARAMETERS, card.parameter}
    for name in parameters:
        if name not in known:
            message = f"no parameter is called {name!r:.80} here; known: {', '.join(sorted(known - {''}))}"
            raise InvalidRequest(message, param=f"parameters.{name:.64}", code="unknown_field")
    slo_ms = _number(parameters, "slo_e2e_ms")
    priority = _number(parameters, "priority")
    if priority is not None and priority != int(priority):
        raise InvalidRequest("priority is a whole number", param="parameters.priority")
    timeout_us = _number(parameters, "timeout")
    return _Urgency(
        slo=None if slo_ms is None else SloBody(e2e_ms=slo_ms),
        priority=None if priority is None else int(priority),
        timeout=timeout_us / 1e6 if timeout_us else None,  # 0 is none of its own, as for Triton
    )


def _number(parameters: Mapping[str, ParameterValue], name: str) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    if isinstance(value, bool | str):
        raise InvalidRequest(f"{name} is a number", param=f"parameters.{name}", code="invalid_type")
    try:
        number = float(value)
    except OverflowError:  # JSON's numbers may have any number of digits
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} is a finite number", param=f"parameters.{name}")
    return number


def _checked(kind: InputKind, data: bytes, place: int, card: CollaborationCard) -> InferenceInput:
    where = f"inputs.{kind.value}"
    if kind is InputKind.TEXT:
        _decoded(data, kind.value, where)
        return InferenceInput(kind=kind, data=data)
    size = image_size(data)
    if size is None:
        raise InvalidRequest(
            f"element {place} of {kind.value!r} is no PNG or JPEG file; send files as they are, in the binary form of "
            "BYTES, or in JSON as base64 with the input's parameter content_type: base64",
            param=where,
        )
    width, height = size
    if card.max_pixels and width * height > card.max_pixels:
        raise InvalidRequest(
            f"element {place} of {kind.value!r} has {width} x {height} pixels; at most {card.max_pixels} are allowed",
            param=where,
        )
    return InferenceInput(kind=kind, data=data)


def _digest(
    model: str, inputs: Sequence[tuple[InferenceInput, ...]], values: Sequence[str | None], slo: Slo, priority: int
) -> bytes:
    """Equal for two calls that ask for the same. ``timeout`` and the outputs that are wanted are not part of it."""
    meaning = msgspec.msgpack.encode((model, inputs, values, slo, priority))
    return hashlib.blake2b(meaning, digest_size=32).digest()
