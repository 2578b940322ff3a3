"""Whether what was learnt may be served: by how near it comes to prompts that it has not seen. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OVERLAP = "overlap"
POPULARITY_OVERLAP = "popularity_overlap"
SERVED_OVERLAP = "served_overlap"
WITHHELD = "withheld"
"""Of an artifact's report: why it is not served; "" or not there: it may be."""


def why_withheld(report: Mapping[str, Any], tolerance: float) -> str:
    """ "" where its overlap on the prompts it has not seen is at most ``tolerance`` below that of popularity by task
    type, and below that of what is served where the report has it; else what is wrong with it."""
    try:
        mine, bar = float(report[OVERLAP]), float(report[POPULARITY_OVERLAP])
        served = float(report.get(SERVED_OVERLAP, bar))
    except (LookupError, TypeError, ValueError):
        return "its report does not say how it compares"
    for other, name in ((bar, "popularity"), (served, "what is served")):
        if not mine >= other - tolerance:  # what is no number passes nothing
            return f"its overlap with prompts it has not seen is {mine:.3f}, that of {name} {other:.3f}"
    return ""
