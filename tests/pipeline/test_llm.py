"""The Python API, on a random checkpoint at a third of its experts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from prometheus_client import CollectorRegistry

from greenroom import LLM, SamplingParams
from greenroom.core.errors import BudgetTooSmall, InvalidConfig, InvalidRequest, UnknownName, UnsupportedModel
from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest
from greenroom.worker.model.metrics import WorkerCollector
from tests.random_checkpoints import save_random
from tests.waiting import DEADLINE_S, until_others

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("qwen3_moe", tmp_path_factory.mktemp("model") / "m", tokenizer=True)


@pytest.fixture(scope="module")
def llm(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    cache = tmp_path_factory.mktemp("cache")
    with LLM(str(checkpoint), expert_memory="33%", policy="lfu", cache_dir=cache, max_running=4, max_waiting=2) as made:
        yield made


def test_completions_equal_generate_in_order(llm: LLM, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, experts_implementation="eager")
    prompts = [[5 + n, 9, 30 + n] * (n + 1) for n in range(9)]  # more than run and wait at once
    for prompt, completion in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert list(completion.token_ids) == ids[0, len(prompt) :].tolist()
        assert completion.prompt_token_ids == tuple(prompt)
        assert completion.finish_reason is FinishReason.LENGTH


def test_text_prompts_and_text_answers(llm: LLM) -> None:
    (completion,) = llm.generate("hello", GREEDY)
    assert completion.prompt == "hello"
    assert completion.text == llm.worker.text.tokenizer.decode(list(completion.token_ids))


def test_chat_is_the_template_applied(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY)
    (same,) = llm.generate("user: hello\nassistant: ", GREEDY)
    assert one.token_ids == same.token_ids
    assert [c.token_ids for c in llm.chat([messages, messages], GREEDY)] == [one.token_ids] * 2


def test_seeds_repeat_and_differ(llm: LLM) -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        sampling = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True)
        return [completion.token_ids for completion in llm.generate(["a", "bb", "ccc"], sampling)]

    assert run(1) == run(1) != run(2)


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    (whole,) = llm.generate("stop test", SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    place = next(n for n in range(3, len(whole.text)) if whole.text[n] not in whole.text[:n] and whole.text[n] != "�")
    stopped = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=(whole.text[place],))
    (cut,) = llm.generate("stop test", stopped)
    assert cut.text == whole.text[:place]
    assert cut.finish_reason is FinishReason.STOP


def test_log_probabilities_are_those_of_the_tokens(llm: LLM) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=3, prompt_logprobs=1)
    (completion,) = llm.generate("some words of a prompt", sampling)
    assert completion.prompt_logprobs is not None
    assert len(completion.prompt_logprobs) == len(completion.prompt_token_ids) - 1
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 4
    for token, entry in zip(completion.token_ids, completion.logprobs, strict=True):
        assert entry.top[0] == (token, entry.chosen)
        assert len(entry.top) == 3


def test_a_prompt_that_can_not_be_served_is_refused_before_any_runs(llm: LLM) -> None:
    steps = llm.worker.loop.stats().steps
    with pytest.raises(InvalidRequest, match="256 tokens"):
        llm.generate([[5], [6] * 300], GREEDY)
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 sampling"):
        llm.generate([[5], [6]], [GREEDY])
    with pytest.raises(InvalidRequest, match="2 prompts, but 1 task"):
        llm.generate([[5], [6]], GREEDY, task_types=["question"])
    assert llm.worker.loop.stats().steps == steps


def test_what_is_too_long_by_its_length_is_refused_without_being_encoded(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*args: Any, **how: Any) -> list[int]:
        raise AssertionError("it is too long by its length alone")

    monkeypatch.setattr(llm.worker.text.tokenizer, "encode", encode)
    with pytest.raises(InvalidRequest, match="256 tokens in all") as refused:
        llm.generate("lorem ipsum " * 10_000, GREEDY)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(InvalidRequest, match="256 tokens in all"):
        llm.chat([{"role": "user", "content": "lorem ipsum " * 10_000}], GREEDY)


def test_nothing_is_left_behind(llm: LLM) -> None:
    llm.generate([[5, 6], [7]], GREEDY)
    assert llm.worker.wait_filled(DEADLINE_S)
    assert llm.worker.loop.wait_idle(DEADLINE_S)
    stats = llm.worker.loop.stats()
    assert stats.running == stats.waiting == stats.kv_reserved_bytes == stats.audit_failures == 0
    llm.worker.experts.audit(idle=True)


_NEVER_CLOSED = """
import atexit, os, sys, threading

@atexit.register
def last():  # what was registered first is called last
    os.write(1, ",".join(sorted(one.name for one in threading.enumerate())).encode())

from greenroom import LLM

llm = LLM(sys.argv[1], cache_dir=sys.argv[2], expert_memory="33%")
"""


def test_one_that_was_never_closed_leaves_no_thread_behind(checkpoint: Path, tmp_path: Path) -> None:
    """A thread that computes while the interpreter ends aborts the process."""
    program = [sys.executable, "-c", _NEVER_CLOSED, str(checkpoint), str(tmp_path)]
    run = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    left = [name for name in run.stdout.split(",") if name.startswith(("batch-loop", "mover", "pages"))]
    assert "MainThread" in run.stdout
    assert not left


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"policy": "magic"}, UnknownName, "known: .*fifo, .*lfu"),
        ({"expert_memory": "20KiB"}, BudgetTooSmall, "picks 2"),
        ({"batching": "magic"}, UnknownName, "batching: 'magic' .*known: fcfs, phases"),
        ({"batching": "fcfs:hold=1"}, InvalidConfig, "fcfs takes no options"),
        ({"batching": "phases:keep=1"}, UnknownName, "known: apart, hold"),
        ({"batching": "phases:hold=NaN"}, InvalidConfig, "hold: nan is not allowed"),
        ({"batching": "fcfs:hold"}, InvalidConfig, "batching: .*NAME:OPTION=VALUE"),
        ({"dtype": "int8"}, InvalidConfig, "dtype"),
        ({"max_running": 0}, InvalidConfig, "max_running"),
        ({"attention": "flash"}, InvalidConfig, "auto, sdpa, eager"),
        ({"kv_memory": "4KiB", "max_model_len": 1}, InvalidConfig, "max_model_len"),
    ],
)
def test_bad_settings_are_refused(
    checkpoint: Path, tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(str(checkpoint), cache_dir=tmp_path, **settings)


def test_the_models_own_thread_may_drop_the_last_reference(checkpoint: Path, tmp_path: Path) -> None:
    """The collector runs on whatever thread is next. That one can not wait for its own end."""
    dropped = LLM(str(checkpoint), cache_dir=tmp_path, expert_memory="33%")
    loop = dropped.worker.loop
    held = [dropped]
    events: list[Event] = []
    del dropped
    loop.between_steps = held.clear
    loop.submit(GenerationRequest("one", (1, 2, 3), GREEDY), events.append)
    until_others(lambda: not loop.alive, "the loop's end")
    until_others(lambda: all(one.name != "llm-close" for one in threading.enumerate()), "the end of what closes it")
    assert not held
    assert loop.failure is None
    assert isinstance(events[-1], Finished)


def test_dense_codes_that_torch_would_compute_are_refused_before_anything_is_packed(
    checkpoint: Path, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match="dense_as"):
        LLM(str(checkpoint), cache_dir=tmp_path, dense_as="stored", products="torch")
    assert not list(tmp_path.rglob("*.pack"))


def test_an_encoder_decoder_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = save_random("switch_transformers", tmp_path / "m", tokenizer=True)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        LLM(str(folder), cache_dir=tmp_path)


def test_little_kv_memory_shortens_requests_and_says_so(checkpoint: Path, llm: LLM, tmp_path: Path) -> None:
    kv = llm.worker.plan.kv // llm.worker.config.max_running // 4
    with LLM(str(checkpoint), expert_memory="50%", kv_memory=str(kv), cache_dir=tmp_path) as short:
        assert 32 < short.worker.served.max_model_len <= 80
        assert "of one request at full length" in short.worker.describe()
        (completion,) = short.generate([[5] * 20], GREEDY)
        assert len(completion.token_ids) == 8
        with pytest.raises(InvalidRequest, match="KV budget"):
            short.generate([[5] * 200], GREEDY)


def test_the_host_tier_serves_the_same(checkpoint: Path, llm: LLM, tmp_path: Path) -> None:
    expected = [completion.token_ids for completion in llm.generate([[5, 6, 7], [8]], GREEDY)]
    with LLM(str(checkpoint), expert_memory="25%", host_memory="50%", cache_dir=tmp_path) as tiered:
        assert [completion.token_ids for completion in tiered.generate([[5, 6, 7], [8]], GREEDY)] == expected
        assert tiered.worker.experts.refresh_counters().bytes_by_link["host-device"] > 0


def test_what_is_measured_by_phase_is_what_the_engine_counted(checkpoint: Path, tmp_path: Path) -> None:
    with LLM(str(checkpoint), expert_memory="25%", host_memory="50%", cache_dir=tmp_path) as tiered:
        registry = CollectorRegistry()
        registry.register(WorkerCollector(tiered.worker))
        tiered.generate([[5, 6, 7], [8]], GREEDY)
    # It is closed, so that nothing moves between the two readings.
    measured = {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
    }
    counters, steps = tiered.worker.experts.refresh_counters(), "greenroom_expert_steps_total"
    assert measured[steps, "prefill"] + measured[steps, "decode"] == measured["greenroom_steps_total",]
    for phase, of in counters.phases.items():
        assert min(of.steps, of.lookups, of.on_demand_fetches) > 0
        for name, value in (
            ("steps", of.steps), ("lookups", of.lookups), ("hits", of.hits), ("stall_seconds", of.stall_seconds),
            ("on_demand_fetches", of.on_demand_fetches),
        ):  # fmt: skip
            assert measured[f"greenroom_expert_{name}_total", phase] == value
        assert measured["greenroom_expert_transfer_bytes_total", "disk", phase, "on-demand"] > 0
    by_link = dict.fromkeys(counters.bytes_by_link, 0.0)
    for (name, *labels), value in measured.items():
        if name == "greenroom_expert_transfer_bytes_total":
            by_link[str(labels[0])] += value
            assert labels[1] in ("prefill", "decode", "between")
            assert labels[2] in ("on-demand", "prefetch")
    assert by_link == counters.bytes_by_link
    assert measured["greenroom_expert_stall_seconds_total", "between"] == counters.between.stall_seconds
