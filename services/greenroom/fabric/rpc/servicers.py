"""Adds servicers to servers, by the generated functions that belong to a servicer's class."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any


def register(servicers: Iterable[object], server: Any) -> list[str]:
    """Adds each servicer's handlers to ``server``. Returns the services' full names.

    A servicer may implement several services. Raises TypeError for an object that is no servicer.
    """
    names = _Names()
    for servicer in servicers:
        found = [kind for kind in type(servicer).__mro__ if _is_generated(kind)]
        if not found:
            raise TypeError(f"{type(servicer).__name__} is no servicer: derive it from a ...Servicer of greenroom.v1")
        for kind in found:
            add = getattr(sys.modules[kind.__module__], f"add_{kind.__name__}_to_server")
            add(servicer, names)
            add(servicer, server)
    return names.services


def _is_generated(kind: type) -> bool:
    return kind.__module__.endswith("_pb2_grpc") and kind.__name__.endswith("Servicer")


class _Names:
    """Takes handlers as a server does, and keeps the services' names."""

    def __init__(self) -> None:
        self.services: list[str] = []

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        pass

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        self.services.append(service)
