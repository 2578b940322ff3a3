"""A group of commands whose errors are messages to the user, and which ends in order on SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import logging
import signal
import sys
import threading
from collections.abc import Iterator

import click

from greenroom.core.errors import GreenroomError

log = logging.getLogger(__name__)


class CommandGroup(click.Group):
    """Shows greenroom's own errors, and the system's, as what they are: messages to the user."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            with _ending_in_order():
                return super().invoke(ctx)
        except GreenroomError as error:
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output has gone: click ends quietly
                raise
            log.debug("the command failed", exc_info=True)
            file = f": {error.filename}" if error.filename else ""
            raise click.ClickException(f"{error.strerror or str(error) or type(error).__name__}{file}") from error
        except ModuleNotFoundError as error:
            if error.name in ("torch", "transformers", "safetensors"):
                raise click.ClickException(
                    f"{error.name} is not installed; models run with: pip install 'greenroom[torch]'"
                ) from error
            raise


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """While it is open SIGTERM unwinds the command as Ctrl-C does, so that nothing half-written stays. An event loop
    that runs meanwhile has its own way."""
    main_thread = threading.current_thread() is threading.main_thread()
    if not main_thread or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
