"""From recorded routing to the weights of paths, and from them to a replay and a worker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.artifacts.path_file import PathFile
from greenroom.policies.duoserve.policy import DuoServe
from greenroom.predictor.kinds.path import fit as path_fit
from greenroom.predictor.kinds.reuse import fit as reuse_fit
from greenroom.replay import RoutingTrace
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run
from tests.short_fits import fit_with

pytestmark = pytest.mark.usefixtures("pack_cache")

EXPERTS = 8


def onward(path: Path, sequences: int, tokens: int, *, seed: int, layers: int = 6, experts: int = EXPERTS) -> str:
    """A token that picks e in a layer picks e + 1 in the next. Returns where it is kept."""
    first = np.random.default_rng(seed).integers(experts, size=(sequences * tokens, 1))
    picks = (first + np.arange(layers)) % experts
    starts = np.arange(sequences + 1) * tokens
    RoutingTrace(picks[..., None].astype(np.uint8), starts, experts, model="onward").save(path)
    return str(path)


def answer(*arguments: str) -> str:
    return run(*arguments).splitlines()[-1]


@pytest.mark.parametrize(("layers", "batch"), [(5, 64), pytest.param(6, 512, marks=pytest.mark.full)])
def test_weights_are_fitted_to_traces_shown_and_replayed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, batch: int
) -> None:
    for module in (path_fit, reuse_fit):
        fit_with(monkeypatch, module, batch=batch)
    out, figures = str(tmp_path / "p.safetensors"), tmp_path / "f.json"
    monday, tuesday = (onward(tmp_path / f"{seed}.npz", 20, 40, seed=seed, layers=layers) for seed in (0, 1))
    said = run("path", "fit", "--trace", monday, "--trace", tuesday, "--rounds", "1", "--out", out)
    assert f"fitted to 40 sequences of onward, {layers} layers × 8 experts" in said
    assert "2 ahead: log loss an expert" in run("path", "show", out)
    shown = json.loads(run("path", "show", out, "--json"))
    assert (shown["sequences"], len(shown["held_out_loss"])) == (40, 2)
    assert max(shown["held_out_loss"]) < 0.2, "a layer says all of the next two"
    reuse = str(tmp_path / "r.safetensors")
    run("reuse", "fit", "--trace", monday, "--averages-only", "--out", reuse)
    own = ("--reuse", reuse, "--window", "1", "--out", str(tmp_path / "own.safetensors"))
    run("path", "fit", "--trace", monday, "--rounds", "1", *own)
    assert "Did you mean" in complaint_of("path", "fit", "--trace", monday, "--reuse-file", reuse)
    later = onward(tmp_path / "later.npz", 10, 40, seed=7, layers=layers)
    common = (
        "replay", later, "--policy", "duoserve", "--policy", "reuse", "--budget", "50%", "--jobs", "1",
        "--link", "1GiB/s", "--expert-bytes", "1MiB", "--compute", "3ms", "--json", str(figures),
    )  # fmt: skip
    stalls = []
    for more in ((), ("--path", out)):
        run(*common, *more)
        cells = {cell["policy"]: cell for cell in json.loads(figures.read_text())["cells"]}
        stalls.append({name: cell["stall_seconds"] for name, cell in cells.items()})
    assert stalls[0]["duoserve"] == pytest.approx(stalls[0]["reuse"]), "without weights it is reuse"
    assert stalls[1]["reuse"] == stalls[0]["reuse"]
    assert stalls[1]["duoserve"] < 0.4 * stalls[1]["reuse"], "a layer is foreseen while the one before computes"


@pytest.mark.parametrize("fits", [{"steps": 50}, pytest.param({}, marks=pytest.mark.full)], ids=["short", "whole"])
def test_a_worker_begins_with_those_in_the_models_folder_and_answers_as_ever(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: dict[str, int]
) -> None:
    for module in (path_fit, reuse_fit):
        fit_with(monkeypatch, module, **fits)
    model, prompts = tmp_path / "m", "\n".join(f"{number} and {number + 1} make" for number in range(24))
    shutil.copytree(checkpoint, model)
    one = ("generate", "a prompt", "--model", str(model), "--raw", "--max-tokens", "12", "--expert-memory", "40%")
    expected = answer(*one, "--policy", "lru")
    file = model / "path.safetensors"
    fit = ("path", "fit", str(model), "--prompts", "-", "--raw", "--max-tokens", "40", "--rounds", "1")
    said = run(*fit, "--expert-memory", "100%", "--out", str(file), text=prompts)
    assert f"fitted to 24 sequences of {model}" in said
    assert PathFile.read(file).report["window"] >= 1
    with ModelRuntime(WorkerConfig(str(model), policy="duoserve", expert_memory="40%", path=file)) as worker:
        assert isinstance(worker.experts.policy, DuoServe)
        version = worker.artifacts["path"]
        assert version is not None
        assert version.version == 1
    assert answer(*one, "--policy", "duoserve") == expected
    (model / "path.safetensors").write_bytes(b"nothing")
    assert answer(*one, "--policy", "duoserve") == expected, "a broken file in the folder is left out"


def test_what_is_known_of_sequences_is_read_before_the_prompts_run(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, prompts = tmp_path / "reuse.safetensors", tmp_path / "prompts.txt"
    damaged.write_bytes(b"nothing")
    prompts.write_text("one\n")
    monkeypatch.setattr("greenroom.cli.path.recorded_of", lambda _: pytest.fail("the prompts have run"))
    out = str(tmp_path / "path.safetensors")
    said = complaint_of(
        "path", "fit", str(checkpoint), "--prompts", str(prompts), "--reuse", str(damaged), "--out", out
    )
    assert "reuse.safetensors" in said


def test_too_little_says_how_much_is_needed(tmp_path: Path) -> None:
    few = onward(tmp_path / "few.npz", 3, 9, seed=0)
    said = run("path", "fit", "--trace", few, "--out", str(tmp_path / "p.safetensors"), status=1)
    assert "at least" in said
    assert not (tmp_path / "p.safetensors").exists()
