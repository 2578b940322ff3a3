"""What learning beside serving takes is measured on the predictor's own jobs."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.duoserve import learning
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.predictor.kinds.config import BuildingConfig
from greenroom.replay import RoutingTrace

LENGTH = 60


def trace_of(sequences: int) -> RoutingTrace:
    """Two layers of four experts, top-2, in an order of its own for each row."""
    order = np.argsort(np.random.default_rng(0).random((sequences * LENGTH, 2, 4)), axis=2)
    return RoutingTrace(
        order[:, :, :2].astype(np.uint16), np.arange(sequences + 1) * LENGTH, num_experts=4, model="tiny"
    )  # fmt: skip


def test_a_job_has_the_last_sequences_that_the_predictor_keeps() -> None:
    most = BuildingConfig().max_sequences
    trace = trace_of(most + 3)
    job = learning.job_of(ReuseFile.KIND, trace)
    assert len(job.samples) == most
    assert np.array_equal(job.samples[0].array, trace.experts[3 * LENGTH : 4 * LENGTH])
    assert np.array_equal(job.samples[-1].array, trace.experts[-LENGTH:])


def test_a_file_is_made_in_a_process_of_its_own_and_within_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    job = learning.job_of(ReuseFile.KIND, trace_of(20))
    made = learning._made(job)
    assert (made["kind"], made["sequences"], made["tokens"]) == (ReuseFile.KIND, 20, 20 * LENGTH)
    assert made["processor_seconds"] > 0
    assert made["peak_mib"] > 1
    monkeypatch.setattr(learning, "JOB_S", 0.0)
    with pytest.raises(RuntimeError, match="not made within 0 s"):
        learning._made(job)
