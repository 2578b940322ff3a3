"""Whatever a test run has started ends with it, however it ends: interrupted, killed, or by a test that forgot.

Each process that runs tests has a reaper: a process of its own that waits for it to be gone and then ends all that it
has left. They are known by a variable of their environment, which children inherit, so nobody has to announce them.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

VARIABLE = "GREENROOM_TEST_PROCESS"
_told = -1


def start() -> None:
    """From now on what this process starts ends with it. Once a process; a child that runs tests has its own."""
    global _told
    name = uuid.uuid4().hex
    reading, _told = os.pipe()
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    with open(reading, "rb") as end:
        reaper = subprocess.Popen(
            [sys.executable, "-I", __file__, name, str(os.getpid())],
            stdin=end, stdout=subprocess.DEVNULL, env=environment, start_new_session=True,
        )  # fmt: skip
    reaper.returncode = 0  # it outlives this process, of which Python would warn
    os.environ[VARIABLE] = name


def remove_afterwards(path: Path) -> None:
    """A folder that goes with what was started."""
    _tell(f"folder {path}")


def stop_afterwards(container: str) -> None:
    """A container is no child of ours."""
    _tell(f"container {container}")


def _tell(line: str) -> None:
    if _told >= 0:
        os.write(_told, f"{line}\n".encode())


def main(name: str, parent: int) -> None:
    """Waits for ``parent`` to end. Its end of the pipe may be held open by a child that it has forked."""
    said = b""
    with contextlib.ExitStack() as stack:
        waited = [0]
        if hasattr(os, "pidfd_open"):
            try:
                waited.append(os.pidfd_open(parent))
            except ProcessLookupError:
                waited = []
            else:
                stack.callback(os.close, waited[1])
        while waited:
            ready, _, _ = select.select(waited, [], [])
            part = os.read(0, 65536) if 0 in ready else b""
            said += part
            if not part:
                break
    _end_all(name)
    for line in said.decode().splitlines():
        kind, _, what = line.partition(" ")
        if kind == "folder":
            shutil.rmtree(what, ignore_errors=True)
        elif kind == "container":
            subprocess.run(["docker", "rm", "--force", what], capture_output=True, timeout=60, check=False)


def _end_all(name: str) -> None:
    """Until a look finds none: one that was being started may come after."""
    import psutil

    for _ in range(10):
        left = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(VARIABLE) == name and process.status() != psutil.STATUS_ZOMBIE:
                    left.append(process)
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=5)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
