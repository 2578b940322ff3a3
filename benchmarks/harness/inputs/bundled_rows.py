"""The bundled model's routing with the rows that its routers got, recorded now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.inputs.bundled_routing import MAX_TOKENS
from greenroom.cli.prompts import Prompt
from greenroom.cli.recording import record_rows, requests_of
from greenroom.core.generation import SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import Sample
from greenroom.moe.routing.router_look_ahead import LookAhead
from greenroom.replay import RoutingTrace
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRows:
    """``rows[T, layers, H]`` of the tokens of ``trace``; ``routers`` run ahead on such rows."""

    trace: RoutingTrace
    rows: NDArray[np.float16]
    routers: LookAhead


def record_bundled_rows(asked: Sequence[Sample]) -> RecordedRows:
    """Of greedy answers. The model's rows are bfloat16, which half floats hold to the bit."""
    config = WorkerConfig(
        str(bundled_model_path()), policy="look-ahead", expert_memory="50%", max_running=8, warm_start=False
    )
    with ModelRuntime(config) as worker:
        routers = worker.hooks.look_ahead
        assert isinstance(routers, LookAhead)
        prompts = [Prompt(one.prompt, task=one.task) for one in asked]
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        requests = requests_of(worker, prompts, sampling, raw=False, system=None, skip_too_long=False)
        trace, rows = record_rows(worker, requests)
    return RecordedRows(trace, rows, routers)


def as_seen(rows: NDArray[np.float16]) -> torch.Tensor:
    """Rows as the model has them."""
    return torch.from_numpy(rows.astype(np.float32)).bfloat16()
