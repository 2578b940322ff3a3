"""The worker's service on the bundled model, a third of its experts in memory, in fp32."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from greenroom.core.generation import Event, Finished, FinishReason, GenerationRequest, SamplingParams, Token
from greenroom.core.messages import Task, Trace, decode
from greenroom.demo import bundled_model_path
from greenroom.demo.tasks import TASKS, samples
from greenroom.moe.batch.completions import complete
from greenroom.policies.base.events import Prediction, PredictionRequest
from greenroom.policies.emoe.popularity import POPULARITY, Popularity
from greenroom.replay import TraceRecorder
from greenroom.text.digest import text_digest
from greenroom.worker.model.card import card_of
from greenroom.worker.model.config import WorkerConfig
from greenroom.worker.model.model_engine import ModelEngine
from greenroom.worker.model.model_runtime import ModelRuntime
from greenroom.worker.runs.results import request_of
from greenroom.worker.service_config import TraceConfig
from greenroom.worker.traces.routing import RoutingRecorder
from tests.pipeline.worker.scripted import Gateway, staged, task_of, until
from tests.waiting import DEADLINE_S

LENGTH = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRuntime]:
    config = WorkerConfig(
        str(bundled_model_path()),
        dtype="float32",
        expert_memory="33%",
        policy="popularity",
        max_running=8,
        threads=1,
        cache_dir=tmp_path_factory.mktemp("cache"),
        served_model_name="understudy",
    )
    with ModelRuntime(config) as worker:
        yield worker
        assert worker.loop.wait_idle(DEADLINE_S)
        assert worker.loop.stats().audit_failures == 0


def tasks(model: ModelRuntime, *, seeded: bool = False) -> list[Task]:
    """One of each type, to be answered greedily or by seeded draws."""
    made = []
    for number, kind in enumerate(TASKS):
        (sample,) = samples(kind, 1, seed=7)
        ids = model.text.tokenizer.encode(sample.prompt, add_special_tokens=True)
        sampling = SamplingParams(
            temperature=0.8 if seeded else 0.0, seed=number if seeded else None, max_tokens=LENGTH, ignore_eos=True
        )
        made.append(asking(task_of(f"{kind}-{seeded}", prompt=ids, task_type=kind), sampling))
    return made


def asking(task: Task, sampling: SamplingParams) -> Task:
    return msgspec.structs.replace(task, request=msgspec.structs.replace(task.request, sampling=sampling))


def alone(model: ModelRuntime, task: Task) -> tuple[int, ...]:
    """What the model says with nothing else running."""
    (answer,) = complete(model.loop, [replace(request_of(task), request_id=task.request.request_id)], timeout_s=60)
    return answer.token_ids


def expect(gateway: Gateway, task: Task, delivered: tuple[int, ...]) -> None:
    gateway.expect(task.request.request_id, *delivered)


@pytest.mark.parametrize("seeded", [False, True])
async def test_answers_are_the_models_own_wherever_an_earlier_attempt_was_cut(
    model: ModelRuntime, seeded: bool
) -> None:
    asked = tasks(model, seeded=seeded)
    whole = [await asyncio.to_thread(alone, model, task) for task in asked]
    recorder = RoutingRecorder(model.experts.catalogue, most_rows=1024)
    async with staged(ModelEngine(model, recorder), card_of(model)) as stage:
        gateway = await stage.gateway()
        await stage.lease()
        calls = []
        for number, (task, answer) in enumerate(zip(asked, whole, strict=True)):
            expect(gateway, task, answer[: 5 * number])
            calls.append(stage.run(task, number))
        results = await asyncio.gather(*calls)
        for task, answer, response in zip(asked, whole, results, strict=True):
            assert tuple(response.result.token_ids) == answer
            assert response.result.prompt_tokens == len(request_of(task).prompt_ids)
        await until(lambda: all(len(got) == LENGTH for got in gateway.got.values()))
        assert [tuple(gateway.got[task.request.request_id]) for task in asked] == whole
        assert stage.service.counters.tokens == sum(LENGTH - 5 * number for number in range(len(asked)))
        state = await stage.service.state()
        assert (state.experts, state.resident_experts) == (model.experts.catalogue.size, model.experts.device.slots)
        assert state.token_ms > 0
        assert state.kv_tokens_free == state.kv_tokens > model.served.max_model_len
        assert state.kv_tokens == model.loop.engine.kv.max_rows, "a scheduler places what the worker would not refuse"
    assert recorder.held == 0
    model.experts.listener = None


@pytest.mark.parametrize("tokens", [False, True])
async def test_the_trace_of_a_sequence_is_its_routing(model: ModelRuntime, tokens: bool) -> None:
    """With its tokens where the configuration says so, whatever was recorded."""
    reference = model.experts.listener = TraceRecorder(model.experts.catalogue)
    task = tasks(model)[0]
    answer = await asyncio.to_thread(alone, model, task)
    expected = reference.trace().experts
    recorder = RoutingRecorder(model.experts.catalogue, most_rows=1024, tokens=True)
    async with staged(ModelEngine(model, recorder), card_of(model), traces=TraceConfig(tokens=tokens)) as stage:
        expect(await stage.gateway(), task, ())
        await stage.lease()
        await stage.run(task)
        await until(lambda: stage.service.counters.traces == 1)
        (written,) = await stage.traces()
    trace: Trace = decode(written, Trace)
    prompt = len(request_of(task).prompt_ids)
    assert (trace.rows, trace.prompt_rows, trace.task_type) == (prompt + LENGTH - 1, prompt, task.task_type)
    experts = np.frombuffer(trace.experts, dtype=trace.dtype).reshape(trace.rows, trace.layers, trace.k)
    assert np.array_equal(np.sort(experts, axis=2), np.sort(expected, axis=2))
    inputs = [*request_of(task).prompt_ids, *answer[:-1]] if tokens else []
    assert np.frombuffer(trace.tokens, dtype="<u4").tolist() == inputs
    model.experts.listener = None


async def test_a_forecast_reaches_the_policy_between_steps(model: ModelRuntime) -> None:
    policy = model.experts.policy
    assert isinstance(policy, Popularity)
    catalogue = model.experts.catalogue
    engine = ModelEngine(model)
    values = np.zeros(catalogue.size, dtype=np.float32)
    wanted = [catalogue.key(layer, catalogue.experts_per_layer[layer] - 1) for layer in range(catalogue.layers)]
    values[wanted] = 1.0
    async with staged(engine, card_of(model)) as stage:
        engine.foresee(Prediction(PredictionRequest(POPULARITY, (0, catalogue.layers), task="forecast"), "3", values))
        await stage.lease()
        task = asking(tasks(model)[0], SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True))
        expect(await stage.gateway(), task, ())
        await stage.run(task)
        assert policy.target is not None
        assert np.flatnonzero(policy.target.wanted).tolist() == wanted
        assert set(wanted) <= set(model.experts.resident_keys().tolist())


class Told:
    """What an engine tells, by number."""

    def __init__(self) -> None:
        self.events: dict[int, list[Event]] = {}

    def take(self, events: list[tuple[int, Event]]) -> None:
        for number, event in events:
            self.events.setdefault(number, []).append(event)

    def ended(self, number: int) -> bool:
        return any(isinstance(event, Finished) for event in self.events.get(number, []))

    def end(self, number: int) -> Finished:
        last = self.events[number][-1]
        assert isinstance(last, Finished)
        return last

    def ids(self, number: int) -> list[int]:
        return [event.token_id for event in self.events.get(number, []) if isinstance(event, Token)]


async def test_a_request_that_is_begun_anew_waits_for_its_former_self(model: ModelRuntime) -> None:
    engine, told = ModelEngine(model), Told()
    engine.listen(told.take)
    request = GenerationRequest("again", (5, 6, 7), SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
    engine.begin(0, request)
    await until(lambda: told.ids(0))
    first = told.ids(0)[0]
    engine.cancel(0)
    engine.begin(1, replace(request, prefix=(Token(0, first),)))
    engine.begin(2, replace(request, request_id="other"))
    await until(lambda: told.ended(1) and told.ended(2))
    assert told.ended(0)
    assert [first, *told.ids(1)] == told.ids(2)
    assert [told.end(number).prefilled for number in range(3)] == [3, 4, 3]
    engine.begin(4, replace(request, request_id="twice"))
    engine.begin(5, replace(request, request_id="twice"))
    engine.cancel(5)  # while it waits for the other
    await until(lambda: told.ended(4) and told.ended(5))
    assert (told.end(5).reason, told.end(5).prefilled) == (FinishReason.CANCELLED, 0)
    engine.begin(3, replace(request, prompt_ids=(10**6,)))
    await until(lambda: told.ended(3))
    (failed,) = told.events[3]
    assert isinstance(failed, Finished)
    assert (failed.reason, failed.error) == (FinishReason.FAILED, failed.error)
    assert "token ids are from 0" in (failed.error or "")
    assert not engine._sequences
    assert not engine._held


def test_the_card_says_what_a_gateway_and_a_pool_must_share(model: ModelRuntime, tmp_path: Path) -> None:
    card = card_of(model)
    assert card == card_of(model)
    assert (card.name, card.vocab_size) == ("understudy", model.served.vocab_size)
    assert card.text_digest == text_digest(bundled_model_path())
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((bundled_model_path() / file).read_bytes())
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert card.text_digest != text_digest(tmp_path)
