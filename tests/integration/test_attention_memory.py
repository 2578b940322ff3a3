"""What the plan charges for attention is what it takes: never less, and not far more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from greenroom.core.units import MIB
from tests.random_checkpoints import save_random

KEYS, ROWS = 6144, 256
CHILD = """
import gc, json, sys
from pathlib import Path
import torch
from greenroom.moe.attention import ragged_attention
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.attention.kv_cache import KVStore
from greenroom.moe.loading.load_model import load
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.forward.ragged_probe import experts_bypassed
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.memory_needs import attention_bytes

def memory(name):
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[name].split()[0]) * 1024

def peak(model, keys, rows):
    kv = KVStore(model.layout, model.layout.nbytes(keys)).reserve(keys)
    for layer in range(kv.layers):
        for part in kv.read(layer, 0, keys):
            part.normal_()
    kv.commit(keys - rows)
    chunk = Chunk(0, [(7 * i + 3) % 250 for i in range(rows)], kv, True, True)
    with experts_bypassed(model.model):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before = memory("VmRSS")
        model.forward([chunk])
    return memory("VmHWM") - before

torch.set_num_threads(1)
figures = []
for folder, attention, at_once in json.loads(sys.argv[1]):
    loaded = load(resolve(folder))
    model = RaggedModel(loaded.model, attention=attention, native=loaded.native)
    ragged_attention.SCORES_AT_ONCE = at_once or ragged_attention.SCORES_AT_ONCE
    peak(model, 512, ROWS)
    config = WorkerConfig(model=folder, tokens_per_step=ROWS, prefill_chunk=ROWS)
    text = loaded.model.config.get_text_config()
    figures.append((peak(model, KEYS, ROWS), attention_bytes(text, model, config, KEYS)))
print(json.dumps(figures))
"""
SHARED = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": KEYS}
LATENT = {
    "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": KEYS,
    "kv_lora_rank": 64, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
}  # fmt: skip
Case = tuple[str, str, str | None, dict[str, Any], int | None]
CASES: list[Case] = [
    ("gpt_oss", "bfloat16", "eager", SHARED, None),
    ("gpt_oss", "bfloat16", "eager", SHARED, 8 * MIB),
    ("gpt_oss", "bfloat16", None, SHARED, None),
    ("mixtral", "bfloat16", "sdpa", {**SHARED, "num_attention_heads": 32}, None),
    ("deepseek_v3", "bfloat16", "sdpa", LATENT, None),
]
FURTHER: list[Case] = [
    ("gpt_oss", "float32", None, SHARED, None),
    ("gpt_oss", "float32", None, SHARED, 8 * MIB),
    ("mixtral", "float32", "sdpa", {**SHARED, "num_attention_heads": 32}, None),
    ("mixtral", "bfloat16", "eager", SHARED, None),
    ("mixtral", "float32", "eager", SHARED, 8 * MIB),
    ("deepseek_v3", "float32", "sdpa", LATENT, None),
]
BESIDE = 16 * MIB
"""Rows' other tensors, and what allocators keep: the plan has places of its own for them."""


@pytest.mark.parametrize("cases", [CASES, pytest.param(FURTHER, marks=pytest.mark.full)])
def test_attention_takes_what_is_charged_for_it(tmp_path: Path, cases: list[Case]) -> None:
    jobs = []
    for number, (family, dtype, attention, changes, at_once) in enumerate(cases):
        folder = save_random(family, tmp_path / str(number), dtype=getattr(torch, dtype), **changes)
        jobs.append((str(folder), attention, at_once))
    child = subprocess.run(
        [sys.executable, "-c", CHILD.replace("ROWS", str(ROWS)).replace("KEYS", str(KEYS)), json.dumps(jobs)],
        check=False, timeout=240, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    if "clear_refs" in child.stderr:
        pytest.skip("this system does not let a process measure its peak anew")
    assert child.returncode == 0, child.stderr
    figures = json.loads(child.stdout.splitlines()[-1])
    described = [
        (*case[:3], taken // MIB, charged // MIB) for case, (taken, charged) in zip(cases, figures, strict=True)
    ]
    for taken, charged in figures:
        assert taken <= charged + BESIDE, described
        assert charged <= 2 * taken + BESIDE, described
    whole, parts = figures[0][0], figures[1][0]
    assert parts < 0.7 * whole, described
