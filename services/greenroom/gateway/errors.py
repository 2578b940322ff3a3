"""Errors as a client sees them: an HTTP status and OpenAI's object."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from http import HTTPStatus

import msgspec
from aiohttp import web

from greenroom.core.errors import Conflict, GreenroomError, InvalidRequest, Saturated
from greenroom.core.generation import FinishReason
from greenroom.fabric.log import LogError
from greenroom.gateway.replies.choices import GenerationFailed
from greenroom.gateway.replies.infer_bodies import InferErrorBody
from greenroom.gateway.replies.reply_bodies import ErrorBody, ErrorDetail

_LOG = logging.getLogger(__name__)
INVALID = "invalid_request_error"
RATE = "rate_limit_error"
SERVER = "server_error"


class ApiError(GreenroomError):
    """What is answered instead of a reply.

    ``status``: of HTTP. ``code``: a stable word for programs. ``kind``: OpenAI's type of error. ``param``: the field at
    fault, None where no field is.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        kind: str = INVALID,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.kind = kind
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """OpenAI's error object in JSON."""
        detail = ErrorDetail(message=str(self), type=self.kind, param=self.param, code=self.code)
        return msgspec.json.encode(ErrorBody(error=detail))

    def infer_body(self) -> bytes:
        """The Open Inference Protocol's error object in JSON."""
        return msgspec.json.encode(InferErrorBody(error=str(self)))

    def response(self, *, infer: bool = False) -> web.Response:
        """``infer``: of a path below /v2."""
        body = self.infer_body() if infer else self.body()
        return web.Response(status=self.status, body=body, content_type="application/json", headers=self.headers)


class ClientGone(Exception):
    """The client closed its connection, or was too slow and was cut off. Nothing can be answered any more."""


def retry_after(seconds: float) -> dict[str, str]:
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def too_many(message: str, code: str, retry_after_s: float) -> ApiError:
    return ApiError(429, message, code=code, kind=RATE, headers=retry_after(retry_after_s))


def saturated(message: str, retry_after_s: float) -> ApiError:
    return too_many(message, "saturated", retry_after_s)


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    return ApiError(503, message, code=code, kind=SERVER, headers=retry_after(retry_after_s))


def failed(message: str, code: str = "generation_failed") -> ApiError:
    return ApiError(500, message, code=code, kind=SERVER)


def too_large(limit: int, what: str = "the request's body is") -> ApiError:
    return ApiError(413, f"{what} larger than the {limit} bytes allowed here", code="body_too_large")


def expired(message: str) -> ApiError:
    return ApiError(504, message, code="expired", kind=SERVER)


def model_not_found(name: str, served: str) -> ApiError:
    message = f"the model {name!r} does not exist here; served: {served}"
    return ApiError(404, message, code="model_not_found", param="model")


def takes_inferences(name: str) -> InvalidRequest:
    """For a prompt to a collaboration of experts."""
    return InvalidRequest(
        f"{name} is a collaboration of whole models and continues no text; POST its inputs to /v2/models/{name}/infer",
        param="model",
        code="takes_inferences",
    )


def takes_prompts(name: str) -> InvalidRequest:
    """For an inference to a model of text."""
    return InvalidRequest(
        f"{name} generates text; POST to /v1/chat/completions or /v1/completions", param="model", code="takes_prompts"
    )


def as_api_error(error: Exception) -> ApiError | None:
    """How ``error`` is answered. None for a defect: the client is told nothing of it."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), code=error.code or "invalid_value", param=error.param)
        case Saturated():
            return saturated(str(error), error.retry_after_s)
        case Conflict():
            return ApiError(409, str(error), code="idempotency_conflict", param="idempotency-key")
        case GenerationFailed():
            return _ended(error)
        case LogError():  # its text names brokers and topics
            _LOG.warning("answered as not queued: %s", error)
            return unavailable("the request was not taken: it can not be queued now; send it again later", "not_sent")
        case GreenroomError():
            return failed(str(error))
        case web.HTTPRequestEntityTooLarge():
            return ApiError(413, "the request's body is larger than allowed here", code="body_too_large")
        case web.HTTPException():
            return _from_http(error)
        case _:
            return None


def _ended(error: GenerationFailed) -> ApiError:
    if error.invalid:
        return ApiError(400, str(error), code="invalid_value")
    match error.reason:
        case FinishReason.CANCELLED:
            return unavailable(str(error), "cancelled")
        case FinishReason.EXPIRED:
            return expired(str(error))
        case FinishReason.SHED:
            return too_many(str(error), "shed", 1.0)
        case _:
            return failed(str(error))


def _from_http(error: web.HTTPException) -> ApiError:
    """The router's own refusals: unknown path, method not allowed."""
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    codes = {404: "unknown_path", 405: "method_not_allowed"}
    messages = {
        404: "there is nothing at this path; see /v1/models, /v1/chat/completions, /v1/completions, and "
        "/v2/models/NAME for a collaboration of experts",
        405: f"this path takes {headers.get('Allow', 'other methods')} only",
    }
    status = error.status
    kind = INVALID if status < 500 else SERVER
    phrase = HTTPStatus(status).phrase
    code = codes.get(status, phrase.lower().replace(" ", "_"))
    return ApiError(status, messages.get(status, phrase), code=code, kind=kind, headers=headers)


def defect() -> ApiError:
    """For a defect. The log says what happened; the client learns nothing of the server's inside."""
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error", kind=SERVER)
