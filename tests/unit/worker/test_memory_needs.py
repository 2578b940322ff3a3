"""What a step's experts' outputs take, by the policy that orders them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from greenroom.experts.pack.layout import PackLayer, PackManifest
from greenroom.moe.architecture.moe_layers import ExpertTensor, MoeLayer
from greenroom.moe.attention.kv_layout import KVLayout, LayerKV
from greenroom.moe.formats.registry import FORMATS
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.policies.expertflow.token_histories import TokenHistory
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.memory_needs import (
    attention_bytes,
    contribution_rows,
    foreseeing_bytes,
    kv_expected_bytes,
    path_bytes,
    workspace_bytes,
)
from tests.unit.experts.fakes import manifest
from tests.unit.policies.model_profiles import model_profile, task_profile


def rows_of(policy: str, top_k: int, **settings: Any) -> int:
    config = WorkerConfig("model", policy=policy, **settings)
    return contribution_rows(manifest(layers=2, experts=16, top_k=top_k), config)


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
def test_a_policy_that_streams_holds_no_more_than_one_that_does_not(top_k: int) -> None:
    for rows in (64, 512, 4096):
        streamed = rows_of("duoserve", top_k, tokens_per_step=rows)
        held = rows_of("reuse", top_k, tokens_per_step=rows)
        assert held == 3 * top_k * rows
        assert streamed <= held


def test_of_long_prompts_it_holds_one_row_of_outputs_a_row_whatever_top_k_is() -> None:
    assert rows_of("duoserve", 8, tokens_per_step=4096) == rows_of("duoserve", 4, tokens_per_step=4096) == 5 * 4096


def test_decoding_rows_hold_all_their_outputs() -> None:
    assert rows_of("duoserve", 8, tokens_per_step=512, max_running=512) == 3 * 8 * 512


@pytest.mark.parametrize("name", ["plain", "lossless", "lossless-planes", "fp8-blocks", "q4_k"])
def test_what_a_step_takes_depends_on_widths_and_not_on_how_records_are_laid_out(name: str) -> None:
    """Mixtral's experts, whose lists of rare exponents have more lines than an expert has outputs."""
    hidden, inner, rows = 4096, 14336, 512
    tensors = (
        ExpertTensor("gate_up_proj", (2 * inner, hidden), torch.bfloat16),
        ExpertTensor("down_proj", (hidden, inner), torch.bfloat16),
    )
    layer = MoeLayer("experts", 8, 2, tensors, stacked=True)
    record = FORMATS[name].record(layer)
    packed = PackManifest("mixtral", "bfloat16", "", (PackLayer("experts", 8, 2, record, name),))
    text, ragged = SimpleNamespace(hidden_size=hidden, intermediate_size=inner), SimpleNamespace(vocab_size=1)

    def of(config: WorkerConfig) -> int:
        return workspace_bytes(text, [layer], packed, cast(RaggedModel, ragged), config)

    more, fewer = (of(WorkerConfig("model", tokens_per_step=count, policy="reuse")) for count in (2 * rows, rows))
    of_a_row = (more - fewer) / rows / 4
    assert of_a_row == pytest.approx(3 * 2 * inner + (12 + 3 * 2) * hidden, rel=0.001)


def test_files_that_picks_are_foreseen_by_count(tmp_path: Path) -> None:
    residual, network = tmp_path / "residual.safetensors", tmp_path / "expert_mlp.safetensors"
    residual.write_bytes(bytes(1000))
    network.write_bytes(bytes(300))
    assert foreseeing_bytes(WorkerConfig("model"), 2) == 0
    assert foreseeing_bytes(WorkerConfig("model", residual=residual), 2) == 1000
    assert foreseeing_bytes(WorkerConfig("model", residual=residual), 4) == 2000, "maps are of the model's own dtype"
    assert foreseeing_bytes(WorkerConfig("model", policy="duoserve:literal=true", expert_mlp=network), 2) == 600
    assert foreseeing_bytes(WorkerConfig("model", residual=tmp_path / "missing"), 2) == 0, "its reader says so"


def test_what_foretells_paths_is_charged_where_it_is_used() -> None:
    traced = manifest(layers=24, experts=32, top_k=4)
    of = partial(WorkerConfig, "model", tokens_per_step=512, max_running=16)
    assert path_bytes(of(policy="reuse"), traced) == 0
    charged = path_bytes(of(policy="expertflow"), traced)
    assert charged == path_bytes(of(batching="token-scheduler"), traced)
    assert charged > 3 * 512 * 768 * 4, "the chances, their logits, and the averages that they are made of"
    histories = [TokenHistory(place, 96, 768) for place in range(16)]
    for history in histories:
        for start in range(0, 5120, 512):
            history.ask(start)
            history.add(np.arange(512))
    held = sum(array.nbytes for one in histories for array in (one._ids, one._keys, one._told))
    assert held < charged - 3 * 512 * 768 * 4


def test_what_requests_are_expected_to_hold_is_the_profiles_mean_for_as_many_as_may_run() -> None:
    profile = model_profile({"code": task_profile([[1, 1], [1, 1]], writes=40)}, load_ms={1: 1.0})
    reads = profile.tasks["code"].input_tokens.mean
    config = WorkerConfig("model", max_running=8)
    layout = KVLayout((LayerKV(2, 64, 2, 64),) * 4, torch.bfloat16, torch.device("cpu"))
    ragged = cast(RaggedModel, SimpleNamespace(layout=layout, device=torch.device("cpu")))
    assert kv_expected_bytes(ragged, config, 4096, profile) == 8 * layout.nbytes(int(np.ceil(reads + 40)))
    assert kv_expected_bytes(ragged, config, 16, profile) == 8 * layout.nbytes(16)
    assert kv_expected_bytes(ragged, config, 4096, None) == 0
    elsewhere = cast(RaggedModel, SimpleNamespace(layout=layout, device=torch.device("cuda")))
    assert kv_expected_bytes(elsewhere, config, 4096, profile) == 0


def test_latent_heads_share_no_keys_when_they_attend() -> None:
    """What is kept is one head. A thread's scores are those of one head of all, however many threads there are."""
    layout = KVLayout((LayerKV(1, 512, 1, 64),), torch.bfloat16, torch.device("cpu"))
    text = SimpleNamespace(
        num_attention_heads=128, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    ragged = cast(RaggedModel, SimpleNamespace(layout=layout, attention="sdpa", attention_compiled=True))
    config, keys, before = WorkerConfig("model"), 1 << 19, torch.get_num_threads()
    try:
        charged = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            charged.append(attention_bytes(text, ragged, config, keys))
    finally:
        torch.set_num_threads(before)
    assert charged[1] - charged[0] == keys * 4
