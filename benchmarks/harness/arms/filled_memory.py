"""Engines whose first fill is over, so that no turn is measured beside it."""

from __future__ import annotations

from greenroom.llm import LLM

FILL_S = 600.0


def filled(llm: LLM) -> LLM:
    """The same, once its expert memory is filled and its loop is at rest. Raises RuntimeError where that takes longer
    than ``FILL_S``."""
    if not (llm.worker.wait_filled(FILL_S) and llm.worker.loop.wait_idle(FILL_S)):
        raise RuntimeError(f"the expert memory was not filled within {FILL_S:g} s")
    return llm
