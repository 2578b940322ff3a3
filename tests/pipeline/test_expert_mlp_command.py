"""From recorded routing to the paper's network, and from it to a replay."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from greenroom.replay import RoutingTrace
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token that picks e in a layer picks e + 1 in the next."""
    path = tmp_path_factory.mktemp("routing") / "t.npz"
    picks = (np.random.default_rng(0).integers(8, size=(800, 1)) + np.arange(4)) % 8
    RoutingTrace(picks[..., None].astype(np.uint8), np.arange(21) * 40, 8, model="onward").save(path)
    return path


def test_a_network_is_trained_shown_and_replayed_with(routing: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "m.safetensors")
    said = run("expert-mlp", "fit", "--trace", str(routing), "--epochs", "1", "--samples", "600", "--out", out)
    assert "fitted to 20 sequences of onward, 4 layers × 8 experts; log loss an expert, held out, 0." in said
    assert run("expert-mlp", "show", out) == said
    shown = json.loads(run("expert-mlp", "show", out, "--json"))
    assert (shown["model"], shown["sequences"], shown["ahead"], shown["many_hot"]) == ("onward", 20, 1, False)
    assert shown["held_out_loss"] > 0
    replay = ("replay", str(routing), "--policy", "duoserve:literal=true", "--budget", "4", "--tokens", "50")
    timed = (*replay, "--link", "1GiB/s", "--expert-bytes", "1MiB", "--jobs", "1")
    assert "that `greenroom expert-mlp fit` makes" in complaint_of(*timed)
    assert "duoserve:literal=true" in run(*timed, "--expert-mlp", out)


def test_fewer_samples_than_a_batch_are_refused(routing: Path, tmp_path: Path) -> None:
    said = complaint_of(
        "expert-mlp", "fit", "--trace", str(routing), "--samples", "1", "--out", str(tmp_path / "m.safetensors")
    )
    assert "x>=512" in said


def test_another_file_is_refused_by_name(routing: Path) -> None:
    assert "`greenroom expert-mlp fit` made" in complaint_of("expert-mlp", "show", str(routing))
