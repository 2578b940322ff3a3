"""The card of a board's experts, in Markdown: what they are, how they were made, what they can not do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_TEXT = """\
---
license: apache-2.0
library_name: transformers
pipeline_tag: image-classification
tags: [collaboration-of-experts, resnet, synthetic, tiny]
---

# greenroom-board

{count} small image classifiers that inspect the components of a circuit board, one after another: an example of a
collaboration of experts, to try, test and measure servers with. They were really trained, on drawn pictures alone.

| | |
| --- | --- |
| architecture | `ResNetForImageClassification`, as transformers ships it; no custom code |
| size | {parameters:,} parameters in the largest, fp32; {bytes:,} bytes of weights in all |
| input | a picture of one component, resized to {pixels} × {pixels} pixels |
| output | what is found: `good` or a defect; of the shared experts, how the component lies |
| collaboration | `board.toml`: the parameter `component` names the first expert; {edges} types go on to a shared one |

## How they were made
```
greenroom coe demo DIR{options}
```
{seconds:.0f} seconds on {threads} threads (torch {torch}, transformers {transformers}). On one machine, with as many
threads and the same versions, the same seed gives the same weights. The parts are drawn by
`greenroom.demo.board.parts`; each crop has a board, a place, a lamp and noise of its own. {crops} crops of each label
are drawn to learn from. First one body learns the labels of all experts ({start_steps} steps of {batch} crops), then
each expert goes on from it alone ({expert_steps} steps).

## Accuracy
The share of crops that got the right label, of {heldout} of each label that were not learnt from. "Other types'": the
same of crops of components that are not the expert's own, over the labels that both have; it says what the route is
worth. How the parts are drawn and for how long experts are trained was settled on crops of seed 0.

| expert | held out | other types' | labels | sees |
| --- | --- | --- | --- | --- |
{rows}

## Limits
The pictures are drawn, and plain beside what cameras see: an expert knows nothing of real boards. Crops are of one
component in the middle, which covers most of them, turned by a few degrees at most where it is not a defect. An expert
that is shown another type's component, or none, says one of its labels all the same. Scores are not calibrated.
"""


@dataclass(frozen=True, slots=True)
class Judged:
    """Shares of held-out crops that got the right label. ``elsewhere``: of crops of other types, over the labels that
    both have; None where no other has any. ``bytes`` and ``parameters``: of the weights. ``types``: that it sees.
    """

    expert: str
    labels: tuple[str, ...]
    types: tuple[str, ...]
    accuracy: float
    elsewhere: float | None
    bytes: int
    parameters: int


@dataclass(frozen=True, slots=True)
class Report:
    """How experts were made and what they can do. ``settings``: those of their training."""

    settings: Mapping[str, Any]
    options: str
    threads: int
    torch: str
    transformers: str
    seconds: float
    pixels: int
    edges: int
    experts: tuple[Judged, ...]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Report:
        experts = tuple(
            Judged(**{**one, "labels": tuple(one["labels"]), "types": tuple(one["types"])}) for one in found["experts"]
        )
        return cls(**{**found, "experts": experts})


def card(report: Report) -> str:
    experts = report.experts
    rows = "\n".join(
        f"| {one.expert} | {one.accuracy:.1%} | {share_of(one.elsewhere)} | {', '.join(one.labels)} "
        f"| {', '.join(one.types)} |"
        for one in experts
    )
    return _TEXT.format(
        **report.settings,
        **{name: getattr(report, name) for name in ("options", "threads", "torch", "transformers", "seconds")},
        pixels=report.pixels,
        edges=report.edges,
        count=len(experts),
        parameters=max(one.parameters for one in experts),
        bytes=sum(one.bytes for one in experts),
        rows=rows,
    )


def table(experts: Sequence[Judged]) -> str:
    """For people at a terminal: a row an expert."""
    rows = [("expert", "held out", "other types'", "bytes", "labels")]
    rows += [
        (one.expert, f"{one.accuracy:.1%}", share_of(one.elsewhere), f"{one.bytes:,}", " ".join(one.labels))
        for one in experts
    ]
    rows.append(("all", "", "", f"{sum(one.bytes for one in experts):,}", ""))
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(row[at].rjust(widths[at]) for at in (1, 2, 3)), row[4]]).rstrip()
        for row in rows
    )


def share_of(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"
