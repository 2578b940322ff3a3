"""A handler's side of a call within the process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from greenroom.fabric.rpc.metadata import Metadata

if TYPE_CHECKING:
    from greenroom.fabric.rpc.exchange import Exchange

FINISHED = "RPC already finished."


class LocalContext(grpc.aio.ServicerContext[Any, Any]):
    """A handler's side. As on the network ``cancelled`` says only what the handler itself has set: a caller that
    cancels is noticed by CancelledError and by ``add_done_callback``."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._aborted: grpc.aio.AbortError | None = None
        self._callbacks: list[Callable[[], object]] = []
        self.status_code = grpc.StatusCode.OK
        self.status_details = ""
        self.trailing: Metadata = ()

    def finished(self, task: asyncio.Task[None]) -> None:
        for callback in self._callbacks:
            callback()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        if self._aborted is not None:
            raise grpc.aio.UsageError("Abort already called!")
        if code is grpc.StatusCode.OK:
            code, details = grpc.StatusCode.UNKNOWN, "an abort can not be OK"
        self._aborted = grpc.aio.AbortError("Locally aborted.")
        self.status_code = code
        self._exchange.end(code, details or self.status_details, tuple(trailing_metadata) or self.trailing)
        raise self._aborted

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        await self.abort(status.code, status.details, status.trailing_metadata)

    async def read(self) -> Any:
        self._raise_if_ended()
        return await self._exchange.requests.get()

    async def write(self, message: Any) -> None:
        self._raise_if_ended()
        await self._exchange.responses.put(message)

    async def send_initial_metadata(self, initial_metadata: Any) -> None:
        self._raise_if_ended()
        self._exchange.initial = tuple(initial_metadata)

    def _raise_if_ended(self) -> None:
        if self._aborted is not None:
            raise self._aborted
        if self._exchange.code is not None:
            raise grpc.aio.UsageError(FINISHED)

    def add_done_callback(self, callback: Any) -> None:
        self._callbacks.append(partial(callback, self))

    def set_trailing_metadata(self, trailing_metadata: Any) -> None:
        self.trailing = tuple(trailing_metadata)

    def trailing_metadata(self) -> Any:
        return self.trailing

    def invocation_metadata(self) -> Any:
        return self._exchange.metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.status_code = code

    def code(self) -> grpc.StatusCode:
        return self.status_code

    def set_details(self, details: str) -> None:
        self.status_details = details

    def details(self) -> str:
        return self.status_details

    def set_compression(self, compression: grpc.Compression) -> None:
        """Nothing is compressed here."""

    def disable_next_message_compression(self) -> None:
        """Nothing is compressed here."""

    def peer(self) -> str:
        return f"local:{self._exchange.peer}"

    def peer_identities(self) -> Iterable[bytes] | None:
        return None

    def peer_identity_key(self) -> str | None:
        return None

    def auth_context(self) -> Mapping[str, Iterable[bytes]]:
        return {}

    def time_remaining(self) -> Any:
        return self._exchange.time_remaining()

    def cancelled(self) -> bool:
        return self.status_code is grpc.StatusCode.CANCELLED

    def done(self) -> bool:
        return self._exchange.code is not None
