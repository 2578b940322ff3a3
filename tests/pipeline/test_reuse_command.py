"""From recorded routing or prompts to the coefficients of the policy reuse, and from them to a replay."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.policies.reuse.policy import Reuse
from greenroom.replay import RoutingTrace
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run

pytestmark = pytest.mark.usefixtures("pack_cache")

LAYERS, EXPERTS = 4, 8


def in_circles(path: Path, sequences: int, tokens: int, *, seed: int, layers: int = LAYERS) -> str:
    """A token after one that used expert e uses e + 1. Returns where the trace is kept."""
    starts = np.random.default_rng(seed).integers(EXPERTS, size=(sequences, 1, layers))
    picks = (starts + np.arange(tokens)[None, :, None]) % EXPERTS
    experts = picks.reshape(-1, layers, 1).astype(np.uint8)
    RoutingTrace(experts, np.arange(sequences + 1) * tokens, EXPERTS, model="circles").save(path)
    return str(path)


def test_coefficients_are_fitted_to_traces_shown_and_replayed_with(tmp_path: Path) -> None:
    out, figures = str(tmp_path / "r.safetensors"), tmp_path / "f.json"
    monday, tuesday = (in_circles(tmp_path / f"{seed}.npz", 20, 30, seed=seed) for seed in (0, 1))
    said = run("reuse", "fit", "--trace", monday, "--trace", tuesday, "--out", out)
    assert "averages and the last two tokens' picks, fitted to 40 sequences of circles, 4 layers × 8 experts" in said
    assert "average 0.97" in run("reuse", "show", out)
    shown = json.loads(run("reuse", "show", out, "--json"))
    assert (shown["sequences"], shown["uses"], len(shown["mean_weights"])) == (40, "followers", 6)
    later = in_circles(tmp_path / "later.npz", 10, 40, seed=7)
    common = ("replay", later, "--policy", "reuse", "--policy", "lru", "--budget", "50%", "--jobs", "1")
    rates, cells = [], {}
    for more in ((), ("--reuse", out)):
        run(*common, *more, "--json", str(figures))
        cells = {cell["policy"]: cell for cell in json.loads(figures.read_text())["cells"]}
        rates.append(cells["reuse"]["hit_rate"])
    assert cells["lru"]["hit_rate"] < 0.05, "eight in a circle and room for four"
    assert rates[1] > max(rates[0], cells["lru"]["hit_rate"]) + 0.1
    assert rates[1] > cells["belady"]["hit_rate"] / 3


def test_coefficients_are_fitted_to_prompts_that_are_run(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.safetensors"
    prompts = "\n".join(f"{number} and {number + 1} make" for number in range(24))
    said = run(
        "reuse", "fit", str(checkpoint), "--prompts", "-", "--raw", "--max-tokens", "40", "--averages-only",
        "--rounds", "1", "--expert-memory", "100%", "--out", str(out), text=prompts,
    )  # fmt: skip
    assert f"averages, fitted to 24 sequences of {checkpoint}," in said
    assert len(ReuseFile.read(out).followers) == 0


def test_a_worker_begins_with_those_in_the_models_folder_or_those_it_is_given(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace = in_circles(tmp_path / "t.npz", 20, 30, seed=0, layers=3)
    model, given = tmp_path / "m", str(tmp_path / "given.safetensors")
    shutil.copytree(checkpoint, model)
    run("reuse", "fit", "--trace", trace, "--out", given)
    run("reuse", "fit", "--trace", trace, "--averages-only", "--out", str(model / "reuse.safetensors"))
    for reuse in (Path(given), model / "reuse.safetensors"):
        with ModelRuntime(WorkerConfig(str(model), policy="reuse", expert_memory="40%", reuse=reuse)) as worker:
            assert isinstance(worker.experts.policy, Reuse)
            assert worker.experts.policy.version == "1"
    one = ("generate", "one", "--model", str(model), "--raw", "--max-tokens", "2")
    assert "lru takes no reuse: leave it out, or choose the policy duoserve or expertflow or reuse" in run(
        *one, "--policy", "lru", "--reuse", given, status=1
    )
    run(*one, "--policy", "reuse")
    assert "reuse predicts by" not in caplog.text
    (model / "reuse.safetensors").write_bytes(b"nothing")
    run(*one, "--policy", "reuse")
    assert (
        "reuse predicts by another model's coefficients: the file in the model's folder can not be used" in caplog.text
    )
    assert "that `greenroom reuse fit` made" in run(
        *one, "--policy", "reuse", "--reuse", str(model / "reuse.safetensors"), status=1
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "either --prompts, to run them, or --trace"),
        (("--trace", "TRACE", "--out", "/nowhere/r"), "there is no folder /nowhere"),
        (("--trace", "TRACE", "--trace", "OTHER"), "traces of one model"),
        (("--trace", "SHORT"), "tokens to learn from"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], why: str, tmp_path: Path) -> None:
    files = {
        "TRACE": in_circles(tmp_path / "t.npz", 20, 30, seed=0),
        "OTHER": in_circles(tmp_path / "o.npz", 20, 30, seed=0, layers=2),
        "SHORT": in_circles(tmp_path / "s.npz", 3, 10, seed=0),
    }
    assert why in complaint_of("reuse", "fit", *(files.get(one, one) for one in arguments))


def test_coefficients_of_another_model_and_what_are_none_are_refused(tmp_path: Path) -> None:
    out, none = tmp_path / "r.safetensors", tmp_path / "none"
    run("reuse", "fit", "--trace", in_circles(tmp_path / "t.npz", 20, 30, seed=0, layers=2), "--out", str(out))
    later = in_circles(tmp_path / "later.npz", 2, 5, seed=0)
    assert "one of this model, 4 layers" in run("replay", later, "--policy", "reuse", "--reuse", str(out), status=1)
    none.write_bytes(b"nothing")
    assert "`greenroom reuse fit` made" in run("replay", later, "--policy", "reuse", "--reuse", str(none), status=1)
