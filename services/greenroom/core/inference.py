"""Requests to a collaboration of experts: inputs that whole models judge, in place of a prompt to continue."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from greenroom.core.collaboration import InputKind
from greenroom.core.generation import Slo


class InferenceInput(msgspec.Struct, frozen=True, kw_only=True):
    """One input as it came from the client."""

    kind: InputKind
    data: bytes


NO_SLO = Slo()


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One thing to judge. ``inputs``: at most one of each kind. ``parameter``: the router's value, None where a model
    routes. The other fields are as in GenerationRequest. ``request_id`` is unique among the running requests."""

    request_id: str
    inputs: tuple[InferenceInput, ...]
    parameter: str | None = None
    tenant: str = ""
    keyed: bool = False
    digest: bytes = b""
    slo: Slo = NO_SLO
    priority: int = 0
    timeout_s: float | None = None
