"""A real process stays within the memory that it announced, its own runtime included."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from greenroom.core.units import MIB
from tests.random_checkpoints import save_random

CHILD = """
import json, sys
from pathlib import Path
{work}
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({{**figures, "peak": int(status["VmHWM"].split()[0]) * 1024}}))
"""
PACK = """
from greenroom.moe.checkpoint import resolve
from greenroom.moe.packing import ensure_pack
from greenroom.worker.machine import resident_bytes
figures = {"base": resident_bytes()}
ensure_pack(resolve(sys.argv[1]), cache_dir=Path(sys.argv[2]))
"""
GENERATE = """
from greenroom import LLM, SamplingParams
with LLM(sys.argv[1], cache_dir=Path(sys.argv[2]), expert_memory=sys.argv[3], policy=sys.argv[4], max_running=8,
         tokens_per_step=128, prefill_chunk=64, warm_start=False) as llm:
    prompts = [[(7 * n + 3 * i) % 250 + 4 for i in range(40 + n)] for n in range(8)]
    llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True, logprobs=5))
    plan = llm.worker.plan
    counters = llm.worker.experts.counters
    figures = {"announced": plan.total, "base": plan.base, "experts": plan.expert_bytes, "kv": plan.kv,
               "all_experts": plan.experts * plan.slot_bytes, "evictions": counters.evictions,
               "prefetches": counters.prefetches}
"""


def run(work: str, *arguments: str) -> dict[str, int]:
    child = subprocess.run(
        [sys.executable, "-c", CHILD.format(work=work), *arguments], check=False, timeout=240,
        capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    figures: dict[str, int] = json.loads(child.stdout.splitlines()[-1])
    return figures


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 96 experts of 4.5 MiB: several times what the allocators could hide."""
    return save_random(
        "mixtral", tmp_path_factory.mktemp("large") / "model", dtype=torch.bfloat16, tokenizer=True,
        max_shard_size="100MB", hidden_size=384, intermediate_size=2048, num_hidden_layers=6, num_local_experts=16,
        head_dim=32,
    )  # fmt: skip


def test_peak_memory_stays_within_what_was_announced(large: Path, tmp_path: Path) -> None:
    packing = run(PACK, str(large), str(tmp_path))
    assert packing["peak"] - packing["base"] < 120 * MIB, "packing holds an expert at a time, not the model"
    quarter = run(GENERATE, str(large), str(tmp_path), "25%", "next-use")
    assert quarter["all_experts"] > 400 * MIB
    assert quarter["experts"] <= quarter["all_experts"] / 4
    assert quarter["evictions"] > 0
    assert quarter["peak"] <= quarter["announced"]
    assert quarter["announced"] < quarter["base"] + 0.8 * quarter["all_experts"], "an announcement that says nothing"
    ahead = run(GENERATE, str(large), str(tmp_path), "25%", "look-ahead")
    assert ahead["prefetches"] > 0
    assert ahead["peak"] <= ahead["announced"]
    resident = run(GENERATE, str(large), str(tmp_path), "100%", "next-use")
    assert resident["peak"] <= resident["announced"]
    assert resident["peak"] - quarter["peak"] > 0.6 * quarter["all_experts"], "the budget is what made the difference"
