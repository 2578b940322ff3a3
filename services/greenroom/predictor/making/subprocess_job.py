"""A job in a process of its own at the lowest priority: the file that it is given, and the file that it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from greenroom.core.errors import GreenroomError
from greenroom.core.files import write_whole
from greenroom.core.units import KIB
from greenroom.predictor.making.workspace import workspace

_NICE = 19
_LOOK_S = 1.0
_MAX_LINE = 500
_MAX_LOG_BYTES = 64 * KIB
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class JobFailed(GreenroomError):
    """The process ended without a result. ``why``: as metrics say it, ``failed`` or ``timed_out``."""

    def __init__(self, message: str, why: str = "failed") -> None:
        super().__init__(message)
        self.why = why


def command_of(module: str) -> Sequence[str]:
    """What starts a module that calls ``work``. Its arguments are the file of the job, the file for the result, and the
    process id without which it ends."""
    return (sys.executable, "-m", module)


async def run_job(command: Sequence[str], job: Callable[[], bytes], *, timeout_s: float) -> bytes:
    """What ``command`` makes of ``job``, which is called in a thread. The process is killed after ``timeout_s``, or
    when this is cancelled, and leaves no files. The job's own is one in memory: it may hold people's text. Raises
    JobFailed, OSError."""
    with workspace() as folder, _file_in_memory() as source:
        target = folder / "artifact.safetensors"
        await asyncio.to_thread(_write, source, job)
        named = [f"/proc/self/fd/{source}", str(target), str(os.getpid())]
        await _run([*command, *named], source, folder / "log", timeout_s)
        try:
            return await asyncio.to_thread(target.read_bytes)
        except OSError as error:
            raise JobFailed(f"it left no artifact: {error}") from error


@contextlib.contextmanager
def _file_in_memory() -> Iterator[int]:
    """Its descriptor. It is gone with the last process that has it open."""
    descriptor = os.memfd_create("greenroom-job", os.MFD_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _write(descriptor: int, job: Callable[[], bytes]) -> None:
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(job())


async def _run(command: Sequence[str], source: int, log: Path, timeout_s: float) -> None:
    """Until it has ended with 0. Raises JobFailed."""
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(source,),
            env={**os.environ, **ONE_THREAD},
        )
    try:
        async with asyncio.timeout(timeout_s):
            code = await process.wait()
    except TimeoutError:
        raise JobFailed(f"it was killed after {timeout_s:g} s", "timed_out") from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if code:
        said = await asyncio.to_thread(_last_line, log)
        raise JobFailed(f"it ended with {code}: {said}")


def _last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MAX_LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    return lines[-1][:_MAX_LINE]


# -- in that process -----------------------------------------------------------------------------------------------


def work(do: Callable[[bytes], bytes]) -> None:
    """The process's main function: ``do`` turns the job's file into the result's, while the parent lives."""
    source, target, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    write_whole(target, do(source.read_bytes()))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
