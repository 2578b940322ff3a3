"""Files that llama.cpp quantises, and what llama.cpp makes of files: ids and, where it computes in float32, logits.

It runs in the environment that ``make bench-peers`` sets up for it; without that these tests skip.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.moe.loading.checkpoint import resolve
from greenroom.moe.loading.load_model import attach, load
from greenroom.moe.loading.packing import ensure_pack
from greenroom.text import TextProcessor
from tests.contract.families.pairs import prompts
from tests.contract.families.sources import ScriptedExperts
from tests.random_checkpoints import VOCAB_SIZE, save_random

gguf = pytest.importorskip("gguf", reason="gguf, which writes the files, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")
Kind = gguf.GGMLQuantizationType

PYTHON = Path(os.environ.get("GREENROOM_PEER_PYTHON", ".venv-peers/bin/python"))
FTYPES = {"Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18, "Q3_K_M": 12, "MXFP4_MOE": 38}
TEXTS = [
    "The quick brown fox jumps over the lazy dog. 1234567 l'été",
    "  two\n\n\nlines\t\tnaïve café — 日本語 Привет 😀 I'll",
    "<|user|>What is 12 + 30?<|end|><|assistant|>",
]

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="llama.cpp's environment is not set up: make bench-peers")

Child = Callable[..., Any]


@pytest.fixture
def child(tmp_path: Path) -> Child:
    def run(**job: Any) -> Any:
        answer, script = tmp_path / "answer.json", Path(__file__).parents[1] / "llama_cpp_child.py"
        (tmp_path / "job.json").write_text(json.dumps({**job, "answer": str(answer)}))
        command = [str(PYTHON), str(script), str(tmp_path / "job.json")]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240, env=environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(answer.read_text())

    return run


@torch.inference_mode()
def our_logits(
    path: Path, root: Path, dtype: str = "float32", given: Sequence[torch.Tensor] | torch.Tensor | None = None
) -> torch.Tensor:
    checkpoint = resolve(str(path))
    pack = ensure_pack(checkpoint, dtype, root / "cache")
    loaded = load(checkpoint, dtype, products="torch")
    attach(loaded, ScriptedExperts.at(pack))
    given = prompts(3, 20) if given is None else given
    return torch.cat([loaded.model(input_ids=ids[None]).logits[0].float() for ids in given])


def llama_logits(child: Child, path: Path, root: Path) -> torch.Tensor:
    made = root / "logits.npy"
    ids = prompts(3, 20).tolist()
    child(model=str(path), texts=[], prompts=ids, special=False, logits=str(made))
    return torch.from_numpy(np.load(made))


@pytest.mark.parametrize("family", checkpoints.ARCHITECTURES)
def test_llama_cpp_computes_the_same_model(child: Child, tmp_path: Path, family: str) -> None:
    """So what is not in the file is said rightly: rotations, routers, windows. It differs by the order of sums."""
    folder = save_random(family, tmp_path / "model", **checkpoints.SIZES[family])
    at = gguf.MODEL_ARCH_NAMES[checkpoints.ARCHITECTURES[family]]
    without = {"tokenizer.ggml.model": "no_vocab", f"{at}.vocab_size": VOCAB_SIZE}
    path = checkpoints.save_gguf(folder, tmp_path / "model.gguf", Kind.F32, metadata=without)
    ours, theirs = our_logits(path, tmp_path), llama_logits(child, path, tmp_path)
    assert ours.shape == theirs.shape
    off = (ours - theirs).abs().amax(-1) / ours.std(-1)
    assert off.median() < 0.01
    assert (off < 0.05).float().mean() > 0.9, "in a random model a router may be undecided up to rounding"


@pytest.mark.parametrize("ftype", FTYPES)
def test_files_that_llama_cpp_quantises(child: Child, tmp_path: Path, ftype: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 4}
    folder = save_random("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16, tokenizer=True, **sizes)
    source = checkpoints.save_gguf(folder, tmp_path / "bf16.gguf", Kind.BF16, pre="gpt-2")
    path = tmp_path / f"{ftype}.gguf"
    assert child(source=str(source), target=str(path), ftype=FTYPES[ftype])["status"] == 0
    kinds = {tensor.dtype for tensor in resolve(str(path)).tensors.values()}
    assert kinds & {"Q8_0", "Q4_K", "Q6_K", "Q3_K", "MXFP4"}, kinds
    meant = checkpoints.as_float32(path, tmp_path / "float32.gguf")
    ours = our_logits(path, tmp_path)
    assert torch.equal(ours, our_logits(meant, tmp_path)), "they mean what gguf's own dequantisers say"


@pytest.mark.parametrize(("ftype", "same"), [("Q8_0", 0.99), ("Q4_K_M", 0.9)])
def test_the_bundled_model_quantised_says_nearly_the_same(
    child: Child, tmp_path: Path, ftype: str, same: float
) -> None:
    """Its rows are no multiples of 256, so llama.cpp takes other types for them, by tensor."""
    source = checkpoints.save_gguf(bundled_model_path(), tmp_path / "bf16.gguf", Kind.BF16, pre="smollm")
    path = tmp_path / f"{ftype}.gguf"
    assert child(source=str(source), target=str(path), ftype=FTYPES[ftype])["status"] == 0
    text = TextProcessor.from_folder(path)
    asked, answering = [], []
    for one in (one for task in TASKS for one in samples(task, 6, seed=3)):
        prompt = text.tokenizer.encode(
            text.chat.render([{"role": "user", "content": one.prompt}]), add_special_tokens=False
        )
        answer = text.tokenizer.encode(one.answer, add_special_tokens=False)
        asked.append(torch.tensor(prompt + answer))
        answering.append(torch.arange(len(prompt + answer)) >= len(prompt) - 1)  # in prompts anything may come next
    answers = torch.cat(answering)
    whole, ours = our_logits(source, tmp_path, given=asked), our_logits(path, tmp_path, given=asked)
    rounded = our_logits(path, tmp_path, "bfloat16", given=asked)
    likeliest = [one[answers].argmax(-1) for one in (whole, ours, rounded)]
    quantising, rounding = ((likeliest[1] == other).float().mean().item() for other in (likeliest[0], likeliest[2]))
    apart = (rounded - ours)[answers].abs().max().item()
    print(f"{ftype}: quantised {quantising:.4f}, in bf16 {rounding:.4f}, {apart:.2f} apart")  # noqa: T201
    assert quantising > same
    assert rounding >= 0.99


def test_llama_cpp_makes_the_same_tokens(child: Child, tmp_path: Path) -> None:
    path = checkpoints.save_gguf(bundled_model_path(), tmp_path / "bundled.gguf", Kind.Q8_0, pre="smollm")
    tokenizer = TextProcessor.from_folder(path).tokenizer
    theirs = child(model=str(path), texts=TEXTS, prompts=[], special=False)["ids"]
    assert theirs == [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
