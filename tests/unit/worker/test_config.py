"""A worker's configuration refuses at once what can not be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from greenroom.cli.model_options import worker_config
from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
from greenroom.core.artifacts.eamc_file import EamcFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.reuse.policy import Reuse
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.usable_memory import usable_cores


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
