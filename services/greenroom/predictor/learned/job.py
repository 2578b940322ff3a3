"""The process that trains: ``python -m greenroom.predictor.learned.job JOB ARTIFACT PARENT``.

Beside whatever else runs on the machine: at the lowest priority, on one thread; it ends when PARENT has.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

_NICE = 19
_LOOK_S = 1.0


def main() -> None:
    source, target, parent = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    os.nice(_NICE)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()

    from greenroom.core.files import write_whole
    from greenroom.predictor.learned.artifact import dump_learned
    from greenroom.predictor.learned.jobs import load_job
    from greenroom.predictor.learned.training import train

    job = load_job(source.read_bytes())
    artifact = train(job.sequences, job.config, model=job.model, served=job.served)
    write_whole(target, dump_learned(artifact))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    main()
