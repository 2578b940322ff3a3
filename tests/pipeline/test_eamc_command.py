"""From prompts or recorded routing to an EAMC, and from it to what moe-infinity makes of a trace."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.moe_infinity.policy import MoeInfinity
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.activation_matrices import activation_matrices
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_runtime import ModelRuntime
from tests.pipeline.commands import complaint_of
from tests.pipeline.commands import output_of as run
from tests.waiting import DEADLINE_S, until

pytestmark = pytest.mark.usefixtures("pack_cache")

LAYERS, EXPERTS = 4, 8


def made_of(model: str, experts: tuple[int, ...], matrices: np.ndarray, sequences: int, **others: Any) -> EamcFile:
    return EamcFile(
        model=model, experts_per_layer=experts, matrices=matrices.astype(np.float32), sequences=sequences, **others
    )


def of_kinds(sequences: int, tokens: int, *, seed: int) -> RoutingTrace:
    """Every second sequence uses the first half of the experts, the others the second, a token four experts running."""
    rng = np.random.default_rng(seed)
    experts = np.empty((sequences * tokens, LAYERS, 2), dtype=np.uint8)
    for sequence in range(sequences):
        own = slice(sequence * tokens, (sequence + 1) * tokens)
        order = rng.permuted(np.tile(np.arange(4), (tokens, LAYERS, 1)), axis=2)[:, :, :2]
        experts[own] = order + 4 * (sequence % 2)
    return RoutingTrace(experts, np.arange(sequences + 1) * tokens, EXPERTS, model="two kinds")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.npz"
    of_kinds(12, 10, seed=0).save(path)
    return path


def test_a_sequences_matrix_says_how_many_of_its_tokens_each_expert_got() -> None:
    picks = np.array([[[0, 1], [3, 255]], [[0, 2], [1, 255]], [[1, 2], [0, 255]]], dtype=np.uint8)
    recorded = RoutingTrace(picks, np.array([0, 2, 3]), np.array([3, 4]), top_k=np.array([2, 1]))
    assert activation_matrices(recorded).tolist() == [[2, 1, 1, 0, 1, 0, 1], [0, 1, 1, 1, 0, 0, 0]]


def test_a_collection_is_built_from_traces_and_shown(trace: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other.npz", tmp_path / "e.safetensors"
    of_kinds(7, 5, seed=1).save(other)
    said = run("eamc", "build", "--trace", str(trace), "--trace", str(other), "--capacity", "2", "--out", str(out))
    assert "2 members chosen from 19 sequences of two kinds, 4 layers × 8 experts" in said
    assert run("eamc", "show", str(out)).endswith(said.split(": ", 1)[1])
    shown = json.loads(run("eamc", "show", str(out), "--json"))
    assert (shown["members"], shown["sequences"], shown["capacity"]) == (2, 19, 2)
    matrices = EamcFile.read(out).matrices.reshape(2, LAYERS, 2, 4).sum(axis=(1, 3))
    assert sorted((row > 0).tolist() for row in matrices) == [[False, True], [True, False]], "one of each kind"


def test_a_collection_is_built_from_prompts_that_are_run(checkpoint: Path, tmp_path: Path) -> None:
    out = tmp_path / "e.safetensors"
    said = run(
        "eamc", "build", str(checkpoint), "--prompts", "-", "--raw", "--max-tokens", "3",
        "--expert-memory", "50%", "--out", str(out), text="one two three\nfour\nfive six\n",
    )  # fmt: skip
    assert f"3 members chosen from 3 sequences of {checkpoint}," in said
    found = EamcFile.read(out)
    layers = found.matrices.reshape(3, len(found.experts_per_layer), -1).sum(axis=2)
    assert (layers == layers[:, :1]).all(), "every token has as many picks in every layer"


def test_replay_tells_the_policy_of_it(trace: Path, tmp_path: Path) -> None:
    out, figures = tmp_path / "e.safetensors", tmp_path / "f.json"
    run("eamc", "build", "--trace", str(trace), "--capacity", "4", "--out", str(out))
    later = tmp_path / "later.npz"
    of_kinds(6, 20, seed=9).save(later)
    timed = ("--link", "1GiB/s,0.1ms", "--expert-bytes", "1MiB", "--compute", "3ms", "--jobs", "1")
    common = ("replay", str(later), "--policy", "moe-infinity", "--budget", "50%", "--no-belady", *timed)
    prefetched = []
    for more in ((), ("--eamc", str(out))):
        run(*common, *more, "--json", str(figures))
        (cell,) = json.loads(figures.read_text())["cells"]
        prefetched.append((cell["prefetches"], cell["prefetches_used"], cell["stall_seconds"]))
    (none, _, waited), (ahead, used, waits) = prefetched
    assert none == 0, "without a collection it only caches"
    assert 0 < used <= ahead
    assert waits < waited


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ((), "either --prompts, to run them, or --trace"),
        (("--prompts", "-", "--trace", "TRACE"), "either --prompts, to run them, or --trace"),
        (("--trace", "TRACE", "--out", "/nowhere/e"), "there is no folder /nowhere"),
        (("--trace", "TRACE", "--trace", "OTHER"), "traces of one model"),
        (("--trace", "EAMC"), "is no routing trace"),
        (("--prompts", "-"), "no prompts in the file"),
        (("one", "--model", "other", "--prompts", "-"), "MODEL is one, and --model is other"),
    ],
)
def test_mistakes_are_explained(arguments: tuple[str, ...], why: str, trace: Path, tmp_path: Path) -> None:
    other, eamc = tmp_path / "other.npz", tmp_path / "e.safetensors"
    RoutingTrace(np.zeros((1, 2, 1), dtype=np.uint8), np.array([0, 1]), 3).save(other)
    made_of("m", (3,), np.ones((1, 3)), 1).write(eamc)
    places = {"TRACE": str(trace), "OTHER": str(other), "EAMC": str(eamc)}
    given = [places.get(one, one) for one in arguments]
    out = () if "--out" in arguments else ("--out", str(tmp_path / "out.safetensors"))
    assert why in complaint_of("eamc", "build", *given, *out, text="")


def test_a_collection_of_another_model_and_what_is_none_are_refused(trace: Path, tmp_path: Path) -> None:
    eamc = tmp_path / "e.safetensors"
    made_of("m", (3, 3), np.ones((1, 6)), 1).write(eamc)
    said = run("replay", str(trace), "--policy", "moe-infinity", "--eamc", str(eamc), status=1)
    assert "2 layers × 3 experts" in said
    assert "one of this model, 4 layers" in said
    eamc.write_bytes(eamc.read_bytes()[:-4])
    assert "that `greenroom eamc build` made" in run("eamc", "show", str(eamc), status=1)


def test_a_model_generates_the_same_with_the_one_in_its_folder(checkpoint: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    shutil.copytree(checkpoint, model)
    prompts = "one two three\nfour\nfive six\n"
    budget = ("--model", str(model), "--expert-memory", "40%", "--max-tokens", "6")
    run("eamc", "build", *budget, "--prompts", "-", "--raw", "--out", str(model / "eamc.safetensors"), text=prompts)
    config = WorkerConfig(str(model), policy="moe-infinity", expert_memory="40%", eamc=model / "eamc.safetensors")
    with ModelRuntime(config) as worker:
        assert isinstance(worker.experts.policy, MoeInfinity)
        assert worker.experts.policy.version == "1"
    answers = []
    for policy in ("lru", "moe-infinity"):
        said = run("generate", *budget, "--policy", policy, "--raw", "--json", text=prompts)
        answers.append([json.loads(line)["text"] for line in said.splitlines() if line.startswith("{")])
    assert len(answers[0]) == 3
    assert answers[0] == answers[1]


def test_what_is_damaged_in_the_models_folder_is_left_out_and_refused_where_it_was_named(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "m"
    shutil.copytree(checkpoint, model)
    damaged = model / "eamc.safetensors"
    damaged.write_bytes(b"nothing")
    one = ("generate", "--model", str(model), "--policy", "moe-infinity", "--raw", "--max-tokens", "2", "one")
    run(*one)
    assert "moe-infinity only caches: the file in the model's folder can not be used" in caplog.text
    assert "that `greenroom eamc build` made" in caplog.text
    assert "that `greenroom eamc build` made" in run(*one, "--eamc", str(damaged), status=1)
    assert "No such file" in run(*one, "--eamc", str(tmp_path / "none"), status=1)


def test_a_policy_that_takes_no_collection_is_given_none(
    checkpoint: Path, trace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    eamc = tmp_path / "e.safetensors"
    made_of("m", (EXPERTS,) * LAYERS, np.ones((1, LAYERS * EXPERTS)), 1).write(eamc)
    takes_none = f"{str(eamc)!r} is not allowed; lru takes no eamc: leave it out, or choose the policy moe-infinity"
    assert takes_none in run(
        "generate", "one", "--model", str(checkpoint), "--policy", "lru", "--eamc", str(eamc), status=1
    )
    assert takes_none in run("replay", str(trace), "--policy", "lru", "--eamc", str(eamc), status=1)
    run("replay", str(trace), "--policy", "lru", "--policy", "moe-infinity", "--eamc", str(eamc))
    model = tmp_path / "m"
    shutil.copytree(checkpoint, model)
    (model / "eamc.safetensors").write_bytes(b"nothing")
    run("generate", "--model", str(model), "--policy", "lru", "--raw", "--max-tokens", "2", "one")
    assert "eamc" not in caplog.text


def test_a_collection_of_traces_that_name_no_model_has_the_one_that_was_given(tmp_path: Path) -> None:
    path, out = tmp_path / "t.npz", str(tmp_path / "e.safetensors")
    replace(of_kinds(4, 5, seed=2), model="").save(path)
    assert "4 sequences of owner/mine," in run("eamc", "build", "owner/mine", "--trace", str(path), "--out", out)


async def test_a_worker_begins_with_the_first_layers_and_fills_the_host_while_nothing_runs(checkpoint: Path) -> None:
    config = WorkerConfig(
        str(checkpoint), policy="moe-infinity", expert_memory="25%", host_memory="50%", warm_start=False
    )
    with ModelRuntime(config) as worker:
        device, host = worker.experts.device, worker.experts.host
        assert host is not None
        assert worker.wait_filled(DEADLINE_S)
        assert np.flatnonzero(device.resident).tolist() == list(range(6))
        await until(lambda: np.flatnonzero(host.resident).tolist() == list(range(6, 18)))
        assert worker.loop.wait_idle(DEADLINE_S)


def test_a_file_comes_back_as_it_was_and_nonsense_does_not_go_in(tmp_path: Path) -> None:
    path = tmp_path / "e.safetensors"
    made = made_of("m", (2, 3), np.arange(10).reshape(2, 5), 7, version=3, created_ms=99, report={"seed": 1})
    made.write(path)
    back = EamcFile.read(path)
    assert (back.model, back.experts_per_layer, back.sequences, back.version, back.created_ms, back.report) == (
        "m", (2, 3), 7, 3, 99, {"seed": 1}
    )  # fmt: skip
    assert back.matrices.tolist() == made.matrices.tolist()
    for wrong in (np.ones((1, 4)), np.ones((0, 5)), np.full((1, 5), np.nan), -np.ones((1, 5))):
        with pytest.raises(InvalidConfig, match="matrices"):
            made_of("m", (2, 3), wrong, 1)
    with pytest.raises(InvalidConfig, match="experts_per_layer"):
        made_of("m", (), np.ones((1, 0)), 1)
    with pytest.raises(InvalidConfig, match="can be read"):
        EamcFile.read(tmp_path / "none")
