"""What is to be made, as the file that a process of its own is given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from greenroom.core.tensors import Damaged, dump_tensors, load_tensors
from greenroom.predictor.traces.counts import Shape
from greenroom.predictor.traces.samples import Sample

_FORMAT = "greenroom-making"
_KEPT, _TOKENS, _EARLIER = "kept", "tokens", "earlier"


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """``samples``: of sequences of the model, oldest first, at least one, all with tokens or none. The last
    ``recorded`` of them are those that were foreseen badly. ``options``: see Kind.options. ``earlier``: the file of an
    earlier artifact; b"": none."""

    kind: str
    model: str
    shape: Shape
    samples: Sequence[Sample]
    options: Mapping[str, Any]
    earlier: bytes = b""
    recorded: int = 0


def dump_job(job: Job) -> bytes:
    metadata = {
        "format": _FORMAT,
        "kind": job.kind,
        "model": job.model,
        "shape": json.dumps([job.shape.layers, job.shape.experts]),
        "tasks": json.dumps([one.task for one in job.samples]),
        "lengths": json.dumps([len(one.array) for one in job.samples]),
        "prompt_rows": json.dumps([one.prompt_rows for one in job.samples]),
        "options": json.dumps(dict(job.options)),
        "recorded": json.dumps(job.recorded),
    }
    kept = np.concatenate([one.array for one in job.samples])
    tokens = [one.tokens for one in job.samples if one.tokens is not None]
    arrays = {_KEPT: kept, _EARLIER: np.frombuffer(job.earlier, np.uint8)}
    return dump_tensors(arrays | ({_TOKENS: np.concatenate(tokens)} if tokens else {}), metadata)


def load_job(data: bytes) -> Job:
    """Raises Damaged."""
    arrays, metadata = load_tensors(data)
    try:
        if metadata["format"] != _FORMAT:
            raise ValueError(f"its format is {metadata['format']!r:.50}")
        ends = np.cumsum(json.loads(metadata["lengths"]))
        kept = np.split(arrays[_KEPT], ends[:-1])
        tokens = np.split(arrays[_TOKENS], ends[:-1]) if _TOKENS in arrays else [None] * len(kept)
        told = zip(json.loads(metadata["tasks"]), kept, tokens, json.loads(metadata["prompt_rows"]), strict=True)
        return Job(
            metadata["kind"],
            metadata["model"],
            Shape(*json.loads(metadata["shape"])),
            [Sample(*one) for one in told],
            json.loads(metadata["options"]),
            arrays[_EARLIER].tobytes(),
            int(json.loads(metadata["recorded"])),
        )
    except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"it is no job: {error!r:.200}") from error
