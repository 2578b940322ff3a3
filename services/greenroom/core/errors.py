"""Errors that greenroom raises on purpose.

Each says what was wrong and what to do about it, in a text that may be shown to a user as it is. Any other error that
escapes is a defect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class GreenroomError(Exception):
    """Base of all errors that greenroom raises on purpose."""

    def __reduce__(self) -> tuple[Any, ...]:
        # For pickling between processes: the classes below are not constructed from ``args``.
        return _made_again, (type(self), self.args, dict(self.__dict__))


def _made_again(kind: type[GreenroomError], args: tuple[Any, ...], state: dict[str, Any]) -> GreenroomError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


class InvalidRequest(GreenroomError):
    """A request that can not be served as it stands. It changed nothing.

    ``param``: the field at fault, None where it is the whole request. ``code``: a stable word for programs.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class Conflict(GreenroomError):
    """Another request has this idempotency key, and it asks for something else."""


class Saturated(GreenroomError):
    """There is no room for one more request now; the same request may go through later."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class InvalidConfig(GreenroomError):
    """A setting that is not allowed; the message names the field, the value and what is allowed."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not allowed; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class UnknownName(InvalidConfig):
    """A look-up by name that failed; the message lists the known names."""

    def __init__(self, field: str, name: object, known: Iterable[str]) -> None:
        super().__init__(field, name, f"known: {', '.join(sorted(known))}")


class BudgetTooSmall(GreenroomError):
    """A memory budget under which the model can not run at all; the message gives the least that works."""


class UnsupportedModel(GreenroomError):
    """A checkpoint of a family or a quantisation that greenroom does not serve; the message lists what works."""


class CorruptCheckpoint(GreenroomError):
    """A checkpoint whose files are missing, truncated or contradict its own configuration."""


class PackError(GreenroomError):
    """A packed expert file that can not be used; the message says why and how to make it anew."""


class ModelBroken(RuntimeError):
    """A defect after which no request can be served any more. No request is at fault: the process of the model ends,
    and other workers take its requests over."""


class PackDamaged(PackError):
    """A packed expert file that is truncated, half-written or altered."""


class TransferFailed(GreenroomError):
    """An expert did not arrive in its tier. The requests that need it fail; the engine goes on."""


class DeadlinePassed(GreenroomError):
    """A request's time was over before it was served."""


class ExpertFailed(GreenroomError):
    """An expert has computed nothing that is of use. The requests of its batch fail; the executor goes on."""
