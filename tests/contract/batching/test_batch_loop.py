"""The batch loop on real models: random schedules, seeds, failures within a forward, many clients at once."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from greenroom.core.errors import TransferFailed
from greenroom.core.generation import FinishReason
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.moe.attention.kv_memory import mapped_bytes
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop
from greenroom.moe.batch.completions import complete
from greenroom.moe.forward.ragged_model import RaggedModel
from greenroom.policies.batching.batch_policy import BatchPolicy
from greenroom.policies.batching.phases import PhasesBatching
from greenroom.policies.registry import BATCH_POLICIES
from tests.contract.batching.harness import Answer, Driver, generate, generate_logits, prompt_of, ragged, request
from tests.examples import examples
from tests.random_checkpoints import random_model

PROMPTS = [prompt_of(length, seed) for seed in range(2) for length in (1, 3, 8, 15, 26)]
TOKENS = 7
BATCHINGS: list[Callable[[], BatchPolicy]] = [
    *BATCH_POLICIES.values(),
    partial(PhasesBatching, apart=True),
    partial(PhasesBatching, hold=1.0),
]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_any_schedule_gives_every_request_its_own_answer(data: st.DataObject) -> None:
    """Random joins, cancels, chunk sizes, limits and KV budgets; audited after every step by the driver."""
    tokens_per_step = data.draw(st.integers(1, 24), "tokens_per_step")
    model = ragged("mixtral", sliding_window=data.draw(st.sampled_from([None, 5]), "window"))
    changes = {} if model is ragged("mixtral", sliding_window=None) else {"sliding_window": 5}
    driver = Driver(
        model,
        kv_budget=data.draw(st.integers(4, 14), "pages") * 4096,
        tokens_per_step=tokens_per_step,
        max_running=data.draw(st.integers(1, tokens_per_step), "max_running"),
        prefill_chunk=data.draw(st.sampled_from([None, 1, 3, 7]), "chunk"),
        policy=data.draw(st.sampled_from(BATCHINGS), "policy")(),
    )
    asked: list[tuple[tuple[int, ...], int, Answer]] = []
    for action in data.draw(st.lists(st.sampled_from(["join", "join", "step", "step", "step", "cancel"]), max_size=40)):
        if action == "join":
            prompt = data.draw(st.sampled_from(PROMPTS))
            tokens = data.draw(st.integers(1, TOKENS))
            asked.append((prompt, tokens, driver.add(request(f"r{len(asked)}", prompt, tokens))))
        elif action == "cancel" and asked:
            driver.engine.cancel(data.draw(st.sampled_from(asked))[2].number)
        else:
            driver.step()
    driver.run()
    for prompt, tokens, answer in asked:
        assert answer.finished is not None
        whole = generate(prompt, TOKENS, "mixtral", sliding_window=changes.get("sliding_window"))
        if answer.finished.reason is FinishReason.LENGTH:
            assert answer.ids == whole[:tokens]
        else:
            assert answer.finished.reason is FinishReason.CANCELLED
            assert answer.ids == whole[: len(answer.ids)]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_a_seed_gives_the_same_text_in_any_company(family: str) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 1234}
    attention = "eager" if family == "gpt_oss" else "sdpa"

    def text(name: str, others: int, **limits: Any) -> tuple[int, ...]:
        driver = Driver(ragged(family, attention), **limits)
        for place in range(others):
            driver.add(request(f"other{place}", prompt_of(5 + 3 * place, 3), 12, temperature=1.0))
            driver.step()
        answer = driver.add(request(name, prompt_of(14), 12, **sampled))
        driver.run()
        return answer.ids

    alone = text("a", 0)
    assert text("b", 5) == alone
    assert text("c", 3, tokens_per_step=7, prefill_chunk=3) == alone
    sampled["seed"] = 1235
    assert text("d", 0) != alone
    sampled["seed"] = None
    by_id = text("e", 0)
    assert text("e", 4) == by_id
    assert text("f", 0) != by_id


def test_the_text_continues_where_a_longer_prompt_takes_over() -> None:
    """A second attempt that is given the first one's tokens as part of its prompt goes on as the first would have."""
    driver = Driver(ragged())
    sampled: dict[str, Any] = {"temperature": 0.8, "seed": 5}
    whole = driver.add(request("whole", prompt_of(9), 12, **sampled))
    driver.run()
    rest = driver.add(request("rest", prompt_of(9) + whole.ids[:5], 7, **sampled))
    driver.run()
    assert whole.ids[5:] == rest.ids


class FailingSource:
    """Knows which sequences a forward is for; the model's last layer asks it whether to fail."""

    def __init__(self, fails: Sequence[int], times: int = 1 << 30) -> None:
        self.fails = set(fails)
        self.times = times
        self.steps: list[tuple[list[int], list[bool]]] = []
        self.open = 0

    @contextlib.contextmanager
    def _step(self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_]) -> Iterator[None]:
        self.steps.append((sequences.tolist(), prefill.tolist()))
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1

    def step(
        self, sequences: NDArray[np.int64], prefill: NDArray[np.bool_], *_: object
    ) -> AbstractContextManager[None]:
        return self._step(sequences, prefill)

    def layer_entered(self, layer: int) -> None: ...

    def allowed_experts(self, layer: int) -> None: ...

    def rerouted(self, layer: int, rows: NDArray[np.bool_]) -> None: ...

    def routed(
        self, layer: int, picks: NDArray[np.int64]
    ) -> AbstractContextManager[Iterator[tuple[int, ExpertWeights]]]:
        raise AssertionError("this model has its own experts")

    def last_layer(self, *_: Any) -> None:
        if self.times and self.fails & set(self.steps[-1][0]):
            self.times -= 1
            raise TransferFailed("expert 7 of layer 2 can not be read")


def with_source(source: FailingSource, family: str) -> RaggedModel:
    model = random_model(family)
    model.set_experts_implementation("eager")
    ours = RaggedModel(model, source, attention="eager" if family == "gpt_oss" else "sdpa")
    model.model.layers[-1].register_forward_pre_hook(source.last_layer)
    return ours


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v2", "gpt_oss"])
@pytest.mark.parametrize("times", [1, 1 << 30])
def test_a_forward_that_fails_half_way_is_taken_back(family: str, times: int) -> None:
    source = FailingSource(fails=[1], times=times)
    driver = Driver(with_source(source, family), tokens_per_step=12, prefill_chunk=6)
    answers = [driver.add(request(f"r{i}", prompt_of(11 + i), 6)) for i in range(3)]
    driver.run()
    attention = "eager" if family == "gpt_oss" else "sdpa"
    for place, answer in enumerate(answers):
        assert answer.finished is not None
        if place == 1 and times > 1:
            assert (answer.finished.reason, answer.ids) == (FinishReason.FAILED, ())
            assert answer.finished.error == "expert 7 of layer 2 can not be read"
        else:
            assert answer.ids == generate(prompt_of(11 + place), 6, family, attention)
    assert driver.engine.snapshot().isolated_steps == 1
    assert source.open == 0


def test_the_source_is_told_whose_rows_and_which_phase() -> None:
    source = FailingSource(fails=[])
    driver = Driver(with_source(source, "mixtral"), tokens_per_step=4)
    driver.add(request("a", prompt_of(2), 3))
    driver.step()
    driver.add(request("b", prompt_of(5), 1))
    driver.run()
    assert source.steps == [
        ([0, 0], [True, True]),
        ([0, 1, 1, 1], [False, True, True, True]),
        ([0, 1, 1], [False, True, True]),
    ]


def test_two_models_in_one_process_do_not_meet() -> None:
    answers: dict[str, list[tuple[int, ...]]] = {}
    loops = {
        family: BatchLoop(BatchEngine(ragged(family, attention), BatchConfig(1 << 20, tokens_per_step=64))).start()
        for family, attention in (("mixtral", "sdpa"), ("gpt_oss", "eager"))
    }
    try:

        def ask(family: str) -> None:
            done = complete(loops[family], [request(f"r{i}", prompt_of(6 + i), 10) for i in range(6)], timeout_s=120)
            answers[family] = [answer.token_ids for answer in done]

        threads = [threading.Thread(target=ask, args=(family,)) for family in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        for loop in loops.values():
            loop.stop()
    assert answers["mixtral"] == [generate(prompt_of(6 + i), 10) for i in range(6)]
    assert answers["gpt_oss"] == [generate(prompt_of(6 + i), 10, "gpt_oss", "eager") for i in range(6)]


def test_fifty_streams_with_a_third_cancelled_leave_nothing_behind() -> None:
    chance = random.Random(3)
    loop = BatchLoop(BatchEngine(ragged(), BatchConfig(40 * 4096, tokens_per_step=48, max_running=16))).start()
    answers = [Answer() for _ in range(50)]
    ended = [threading.Event() for _ in answers]
    begun = [threading.Event() for _ in answers]

    def client(place: int, cancels_after: int | None) -> None:
        def take(event: Any) -> None:
            answers[place].take(event)
            if answers[place].finished is not None:
                ended[place].set()
                begun[place].set()
            elif cancels_after is not None and len(answers[place].tokens) >= cancels_after:
                begun[place].set()

        number = loop.submit(request(f"r{place}", PROMPTS[place % len(PROMPTS)], 12), take, wait_s=60)
        if cancels_after is not None:
            if cancels_after:
                assert begun[place].wait(60)
            loop.cancel(number)
        assert ended[place].wait(60)

    plans = [chance.randrange(6) if place % 3 == 0 else None for place in range(50)]
    threads = [threading.Thread(target=client, args=(place, plan)) for place, plan in enumerate(plans)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert loop.wait_idle(60)
        for place, (plan, answer) in enumerate(zip(plans, answers, strict=True)):
            assert answer.finished is not None, place
            whole = generate(PROMPTS[place % len(PROMPTS)], 12)
            assert answer.ids == whole[: len(answer.ids)]
            if plan is None:
                assert answer.ids == whole
        stats = loop.stats()
        assert stats.finished[FinishReason.CANCELLED] >= 10
        assert stats.finished[FinishReason.FAILED] == 0
        assert (stats.running, stats.waiting, stats.kv_reserved_bytes, loop.unfinished) == (0, 0, 0, 0)
        assert (stats.audit_failures, stats.isolated_steps) == (0, 0)
        assert 0 < stats.kv_peak_bytes <= 40 * 4096
        assert mapped_bytes() == 0
    finally:
        loop.stop()


def test_logprobs_are_those_of_the_models_own_logits() -> None:
    driver = Driver(ragged("granitemoe"))
    answer = driver.add(request("a", prompt_of(12), 5, logprobs=4))
    driver.run()
    own = torch.log_softmax(generate_logits(prompt_of(12), 5, "granitemoe", "sdpa", torch.float32), -1)
    for token, row in zip(answer.tokens, own, strict=True):
        assert token.logprobs is not None
        assert token.logprobs.chosen == pytest.approx(float(row.max()), abs=1e-5)
        assert [i for i, _ in token.logprobs.top] == row.topk(4).indices.tolist()
