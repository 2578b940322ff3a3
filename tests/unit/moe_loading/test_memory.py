"""What loading and packing cost in memory, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

MEASURE = """
import json, os, sys, threading, psutil
from pathlib import Path
import torch
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import load
from greenroom.moe.loading.packing import ensure_pack

torch.set_num_threads(1)
process = psutil.Process()

def peak(work):
    '''Growth of private memory while work runs, sampled: the most ever and what stays.'''
    start, done, most = process.memory_info().rss, threading.Event(), [0]
    def watch():
        while not done.wait(0.002):
            most[0] = max(most[0], process.memory_info().rss - start)
    watcher = threading.Thread(target=watch)
    watcher.start()
    kept = work()
    done.set()
    watcher.join()
    return kept, most[0]

small, big, cache = sys.argv[1], sys.argv[2], Path(sys.argv[3])
load(resolve(small))  # what transformers imports lazily is not this model's
ensure_pack(resolve(small), cache_dir=cache)
checkpoint = resolve(big)
pack, packing = peak(lambda: ensure_pack(checkpoint, cache_dir=cache))
loaded, loading = peak(lambda: load(checkpoint))
dense = sum(parameter.nbytes for parameter in loaded.model.parameters())
print(json.dumps({"packing": packing, "loading": loading, "dense": dense, "pack": pack.stat().st_size}))
"""
MIB = 1 << 20


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 experts of 6 MiB, 13 MiB of everything else."""
    folder = tmp_path_factory.mktemp("big") / "model"
    config = MixtralConfig(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=1024,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=1,
        num_local_experts=16,
        num_experts_per_tok=2,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cpu")
    for number, parameter in enumerate(model.parameters()):
        parameter.data.fill_(number)  # what they are does not matter here, only how large they are
    model.save_pretrained(folder, max_shard_size="100MB")
    return folder


def test_experts_never_come_to_memory(big: Path, pristine: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(pristine), str(big), str(tmp_path / "cache")]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert answer.returncode == 0, answer.stderr
    grown = json.loads(answer.stdout.splitlines()[-1])
    experts = 3 * 16 * 6 * MIB
    assert grown["pack"] > experts
    assert grown["loading"] < 2 * grown["dense"] + 24 * MIB < experts / 4
    assert grown["packing"] < 64 * MIB, "a few experts at a time, whatever their number"
