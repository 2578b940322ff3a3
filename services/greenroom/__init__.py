"""greenroom: serves Mixture-of-Experts models whose experts do not fit in the accelerator's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from greenroom.core.generation import SamplingParams
    from greenroom.llm import LLM, Completion


def __getattr__(name: str) -> Any:
    """``LLM`` needs torch, which services that only route requests do not have; so it is imported when asked for."""
    if name in ("LLM", "Completion"):
        from greenroom.moe.openmp_waits import wait_briefly

        wait_briefly()  # before torch is imported, if nobody has yet
        from greenroom import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from greenroom.core.generation import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
