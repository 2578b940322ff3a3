"""Engines whose first fill is over, so that no turn is measured beside it."""

from __future__ import annotations

import time

from greenroom.llm import LLM

FILL_S = 600.0
POLL_S = 0.05


def filled(llm: LLM) -> LLM:
    """The same, once its expert memory is filled and its loop is at rest. Raises RuntimeError where that takes longer
    than ``FILL_S``."""
    if not (llm.worker.wait_filled(FILL_S) and llm.worker.loop.wait_idle(FILL_S)):
        raise RuntimeError(f"the expert memory was not filled within {FILL_S:g} s")
    host = llm.worker.experts.host
    if host is not None:  # it is filled behind the device, read after read, and says nothing when it is done
        deadline = time.monotonic() + FILL_S
        while int(host.resident.sum()) < min(host.slots, llm.worker.experts.catalogue.size):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the host tier was not filled within {FILL_S:g} s")
            time.sleep(POLL_S)
    return llm
