"""A process of its own for each system under measurement, so that its peak memory is its own.

    python -m benchmarks.harness.children.child SPECIFICATION REPLY_FD

Reads one JSON command a line from stdin (``{"do": "run", ...}``) and answers each with one JSON line on the descriptor:
``{"ok": ...}`` or ``{"error": ..., "kind": ...}``. Ends when stdin does. Whatever libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any, Protocol

SYSTEMS = {
    "prepare": "benchmarks.harness.arms.prepare:Prepare",
    "greenroom": "benchmarks.harness.arms.greenroom_arm:GreenroomArm",
    "transformers": "benchmarks.harness.arms.transformers_arms:TransformersArm",
    "disk_offload": "benchmarks.harness.arms.transformers_arms:DiskOffloadArm",
    "device_map": "benchmarks.harness.arms.transformers_arms:DeviceMapArm",
}
"""Short names; ``module:Class`` names any other."""


class Arm(Protocol):
    """What is measured. Constructed with the specification's settings, which may take long."""

    def describe(self) -> dict[str, Any]:
        """What a driver needs to know once it is ready."""
        ...

    def close(self) -> None:
        """End it; the arm is used no more."""
        ...


def serve(system: str, settings: dict[str, Any], reply_fd: int) -> None:
    """Open the system and answer that it is ready. Then obey commands until stdin ends or ``close`` comes."""
    arm: Arm | None = None
    with os.fdopen(reply_fd, "w") as replies:

        def reply(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")
            replies.flush()

        try:
            module, _, name = SYSTEMS.get(system, system).partition(":")
            arm = getattr(importlib.import_module(module), name)(**settings)
            assert arm is not None
            reply({"ok": arm.describe()})
            for line in sys.stdin:
                command = json.loads(line)
                action = command.pop("do")
                if action == "close":
                    break
                try:
                    reply({"ok": getattr(arm, action)(**command)})
                except Exception as error:  # told to the driver, which decides whether to go on
                    reply(_failure(error))
        except Exception as error:
            reply(_failure(error))
            raise SystemExit(1) from error
        finally:
            if arm is not None:
                arm.close()


def _failure(error: Exception) -> dict[str, str]:
    traceback.print_exception(error)
    return {"error": str(error) or type(error).__name__, "kind": type(error).__name__}


def main() -> None:
    specification = json.loads(sys.argv[1])
    os.dup2(2, 1)  # what libraries print is no reply
    serve(specification["system"], specification["settings"], int(sys.argv[2]))


if __name__ == "__main__":
    main()
