"""A worker's configuration refuses at once what can not be meant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from greenroom.cli.model_options import worker_config
from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.artifacts.residual_file import LayerMaps, ResidualFile, ResidualForm
from greenroom.core.errors import InvalidConfig
from greenroom.policies.reuse.policy import Reuse
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.usable_memory import usable_cores
from tests.contract.prepared_policies import mlp_file


def test_threads_are_some_a_core() -> None:
    assert WorkerConfig("model", threads=1).threads == 1
    for wrong in (0, 100 * usable_cores()):
        with pytest.raises(InvalidConfig, match="threads"):
            WorkerConfig("model", threads=wrong)


def test_a_prompt_has_the_rows_that_the_batch_policy_gives_it() -> None:
    """The memory for attention is planned by it."""
    assert WorkerConfig("model", tokens_per_step=512, prefill_chunk=256).prompt_rows == 256
    assert WorkerConfig("model", tokens_per_step=128, prefill_chunk=256).prompt_rows == 128
    assert WorkerConfig("model", tokens_per_step=512, prefill_chunk=256, batching="phases").prompt_rows == 512


def test_rows_of_a_step_are_a_number_or_left_to_the_plan() -> None:
    assert WorkerConfig("model", tokens_per_step="auto").step_rows == 512
    assert WorkerConfig("model", tokens_per_step="auto", max_running=700).step_rows == 700
    assert not WorkerConfig("model", tokens_per_step="auto").wants_whole_prompts, "chunks need no more"
    assert WorkerConfig("model", tokens_per_step="auto", batching="phases").wants_whole_prompts
    assert WorkerConfig("model", tokens_per_step="auto", prefill_chunk=None).wants_whole_prompts
    assert not WorkerConfig("model", tokens_per_step=64, batching="phases").wants_whole_prompts
    with pytest.raises(InvalidConfig, match=r"tokens_per_step: 'many' .* a number of rows, or auto"):
        WorkerConfig("model", tokens_per_step="many")


@pytest.mark.parametrize(("kind", "taker"), [("eamc", "moe-infinity"), ("path", "duoserve"), ("reuse", "reuse")])
def test_a_file_is_for_the_policy_that_predicts_by_it(kind: str, taker: str) -> None:
    file: dict[str, Any] = {kind: Path("a.safetensors")}
    assert WorkerConfig("model", policy=taker, **file).artifact_files == {kind: Path("a.safetensors")}
    assert WorkerConfig("model", policy=taker).artifact_files == {}
    with pytest.raises(InvalidConfig, match=f"lru takes no {kind}: leave it out, or choose the policy .*{taker}"):
        WorkerConfig("model", policy="lru", **file)


def test_a_policy_may_be_spelt_with_its_options() -> None:
    spelt = WorkerConfig("model", policy="decayed:decay=0.9")
    assert (spelt.policy, spelt.policy_options) == ("decayed", {"decay": 0.9})
    both = WorkerConfig("model", policy="decayed:decay=0.9", policy_options={"host": True})
    assert both.policy_options == {"decay": 0.9, "host": True}
    assert replace(both, threads=1).policy_options == both.policy_options
    with pytest.raises(InvalidConfig, match=r"policy: 'decayed:decay=0.9' .*decay once"):
        WorkerConfig("model", policy="decayed:decay=0.9", policy_options={"decay": 0.5})
    with pytest.raises(InvalidConfig, match=r"policy: 'decayed:decay'"):
        WorkerConfig("model", policy="decayed:decay")


def test_the_printed_duoserve_is_refused_without_its_network(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    literal, file = "duoserve:literal=true", tmp_path / "expert_mlp.safetensors"
    for policy, own in ((literal, {}), ("duoserve", {"literal": True})):
        with pytest.raises(InvalidConfig, match=r"expert_mlp: None .*`greenroom expert-mlp fit`.*--expert-mlp"):
            WorkerConfig("model", policy=policy, policy_options=own)
    assert WorkerConfig("model", policy=literal, expert_mlp=file).artifact_files == {"expert_mlp": file}
    with pytest.raises(InvalidConfig, match=r"duoserve takes no expert_mlp.*choose the policy duoserve:literal=true"):
        WorkerConfig("model", policy="duoserve", expert_mlp=file)
    options: dict[str, Any] = {"model": str(tmp_path), "revision": None, "policy": literal, "policy_options": "{}"}
    with pytest.raises(InvalidConfig, match=r"expert_mlp: None"):
        worker_config(dict(options))
    assert not caplog.text, "the refusal says it once; a predictor service would not help"
    mlp_file([4, 4], 2).write(file)
    assert worker_config(dict(options)).artifact_files == {"expert_mlp": file}, "beside the model"
    (tmp_path / "other").write_bytes(file.read_bytes()[:-2])
    with pytest.raises(InvalidConfig, match=r"expert_mlp.*`greenroom expert-mlp fit` made"):
        worker_config({**options, "expert_mlp": tmp_path / "other"})


def test_a_kind_that_has_no_option_comes_from_the_predictor_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new kind of file concerns neither the workers that do not predict by it, nor the options of those that do."""
    monkeypatch.setattr("greenroom.worker.model.config.ARTIFACT_FILES", {**ARTIFACT_FILES, "mlp": EamcFile})
    monkeypatch.setattr(Reuse, "artifacts", frozenset({"mlp"}))
    (tmp_path / "mlp.safetensors").write_bytes(b"no artifact")
    for policy in ("lru", "reuse"):
        options = {"model": str(tmp_path), "revision": None, "policy": policy, "policy_options": "{}"}
        assert worker_config(options).artifact_files == {}


def test_maps_beside_a_model_are_for_policies_that_run_routers_ahead(tmp_path: Path) -> None:
    about: dict[str, Any] = {"model": "", "experts_per_layer": (2, 2), "sequences": 1}
    maps = LayerMaps(None, np.zeros(0, np.float32), np.zeros((4, 2), np.float16), np.zeros(2, np.float32))
    ResidualFile.of_layers(ResidualForm(4, 0, 1, silu=False), [maps], **about).write(tmp_path / "residual.safetensors")
    mlp_file([4, 4], 2).write(tmp_path / "expert_mlp.safetensors")
    options: dict[str, Any] = {"model": str(tmp_path), "revision": None, "policy_options": "{}"}
    for policy, residual in (("reuse", tmp_path / "residual.safetensors"), ("duoserve:literal=true", None)):
        assert worker_config({**options, "policy": policy}).residual == residual, policy


def test_what_a_policy_does_not_take_is_said_of_it_as_it_is_written(tmp_path: Path) -> None:
    literal, file = "duoserve:literal=true", tmp_path / "a.safetensors"
    with pytest.raises(InvalidConfig, match=f"{literal} runs no router ahead.* policy duoserve or look-ahead or reuse"):
        WorkerConfig("model", policy=literal, expert_mlp=file, residual=file)
    with pytest.raises(InvalidConfig, match=f"{literal} takes no path: .*choose the policy duoserve$"):
        WorkerConfig("model", policy=literal, expert_mlp=file, path=file)


def test_more_requests_than_rows_run_only_where_the_batch_policy_plans_rounds() -> None:
    with pytest.raises(InvalidConfig, match="max_running"):
        WorkerConfig("model", tokens_per_step=16, max_running=32)
    limits = WorkerConfig("model", tokens_per_step=16, max_running=32, batching="token-scheduler").limits(7)
    assert (limits.plans_rounds, limits.max_running, limits.rows_per_forward) == (True, 32, None)


def test_decode_rows_of_a_forward_are_bounded_by_the_rows_of_a_step() -> None:
    assert WorkerConfig("model", rows_per_forward=4).limits(7).rows_per_forward == 4
    with pytest.raises(InvalidConfig, match=r"rows_per_forward: 513 .*from 1 to tokens_per_step \(512\)"):
        WorkerConfig("model", rows_per_forward=513)
