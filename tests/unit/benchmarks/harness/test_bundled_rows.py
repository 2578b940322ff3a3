from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.inputs.bundled_routing import drawn_prompts
from benchmarks.harness.inputs.bundled_rows import as_seen, record_bundled_rows


def test_recorded_rows_are_those_that_the_routers_saw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On its own layer's rows each router picks what was recorded, token by token."""
    monkeypatch.setenv("GREENROOM_CACHE", str(tmp_path))
    recorded = record_bundled_rows(drawn_prompts(3))
    trace = recorded.trace
    assert (trace.sequences, trace.layers) == (3, 6)
    assert recorded.rows.shape[:2] == (trace.tokens, 6)
    for layer in range(trace.layers):
        with torch.inference_mode():
            weights = recorded.routers.weights(layer, layer, as_seen(recorded.rows[:, layer]))
        picked = np.sort(np.argsort(-weights, axis=1)[:, :2], axis=1)
        same = (picked == np.sort(trace.experts[:, layer], axis=1)).mean()
        assert same > 0.98, "but for ties: compiled products round otherwise"
