"""A GGUF file of the bundled model, served: the answers of the bundled model, by command, by Python and by HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from greenroom import LLM, SamplingParams
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.embedded import EmbeddedConfig
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from tests.pipeline.commands import complaint_of, result_of
from tests.pipeline.embedded import embedded
from tests.waiting import DEADLINE_S

gguf = pytest.importorskip("gguf", reason="gguf, which writes the file, is not installed")
checkpoints = pytest.importorskip("tests.gguf_checkpoints")

CHATS = [[{"role": "user", "content": one.prompt}] for task in TASKS for one in samples(task, 2, seed=5)]
SAMPLING = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By type; bfloat16 in several files."""
    root = tmp_path_factory.mktemp("gguf")
    kinds = gguf.GGMLQuantizationType
    bundled = bundled_model_path()
    return {
        "BF16": checkpoints.save_gguf(bundled, root / "bf16.gguf", kinds.BF16, pre="smollm", shard_tensors=40),
        "Q8_0": checkpoints.save_gguf(bundled, root / "q8_0.gguf", kinds.Q8_0, pre="smollm"),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def answers(cache: Path, model: str | None = None) -> list[tuple[str, tuple[int, ...]]]:
    with LLM(model, expert_memory="33%", policy="lfu", cache_dir=cache, warm_start=False, threads=1) as llm:
        return [(one.text, one.token_ids) for one in llm.chat(CHATS, SAMPLING)]


def test_answers_are_those_of_the_checkpoint(files: dict[str, Path], cache: Path) -> None:
    assert answers(cache, str(files["BF16"])) == answers(cache)


def test_eight_bits_answer_nearly_the_same(files: dict[str, Path], cache: Path) -> None:
    pairs = list(zip(answers(cache, str(files["Q8_0"])), answers(cache), strict=True))
    assert sum(ours == theirs for ours, theirs in pairs) >= 0.8 * len(pairs)


@pytest.fixture
def runtime(files: dict[str, Path], cache: Path) -> Iterator[ModelRuntime]:
    config = WorkerConfig(
        str(files["Q8_0"]),
        served_model_name="eight-bits",
        expert_memory="33%",
        policy="lfu",
        cache_dir=cache,
        threads=1,
    )
    with ModelRuntime(config) as made:
        yield made


async def test_it_is_served_by_the_openai_api(runtime: ModelRuntime, cache: Path) -> None:
    card = card_of(runtime)
    assert card.name == "eight-bits"
    assert card.eos_token_ids == (2,)
    async with (
        embedded(EmbeddedConfig(), ModelEngine(runtime), card, runtime.text) as (gateway, _),
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as http,
    ):
        said = []
        for messages in CHATS:
            body = {"model": "eight-bits", "messages": messages, "temperature": 0, "max_tokens": 24}
            url = f"http://127.0.0.1:{gateway.port}/v1/chat/completions"
            async with http.post(url, json=body) as response:
                reply = await response.json()
                assert response.status == 200, reply
                said.append(reply["choices"][0]["message"]["content"])
    direct = await asyncio.to_thread(answers, cache, str(runtime.config.model))
    assert said == [text for text, _ in direct]


def test_the_commands_take_it(files: dict[str, Path], pack_cache: None) -> None:
    told = result_of("info", str(files["Q8_0"])).stdout
    assert "qwen3_moe, bfloat16" in told
    assert "as the file's metadata says" in told
    both = [json.loads(result_of("info", *named, "--json").stdout) for named in ((str(files["BF16"]),), ())]
    assert both[0] | {"name": ""} == both[1] | {"name": ""}
    packed = Path(result_of("pack", str(files["Q8_0"]), "--verify").stdout.splitlines()[-1])
    assert packed.is_file()
    text = result_of("generate", "--model", str(files["Q8_0"]), "--max-tokens", "4", "--threads", "1", "hello").stdout
    assert text.strip()


def test_a_file_that_is_not_there_or_broken_is_told_at_once(tmp_path: Path) -> None:
    assert "there is no such file" in complaint_of("info", str(tmp_path / "none.gguf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(20))
    assert "bad.gguf" in complaint_of("pack", str(tmp_path / "bad.gguf"))
