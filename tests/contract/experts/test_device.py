"""Whole models on a device with memory of its own: each test on the stand-in, and under ``-m cuda`` on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from greenroom import LLM, SamplingParams
from greenroom.demo.tasks import TASKS, samples
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.llm import GenerationFailed
from greenroom.moe.architecture.moe_layers import MoeLayer
from greenroom.moe.formats.expert_format import Expander, ExpertFormat
from greenroom.moe.kernels.expert_ring import ExpertRing
from greenroom.worker.model.model_engine import ModelEngine
from tests.contract.prepared_policies import LITERAL, mlp_file
from tests.mxfp4_checkpoints import save_mxfp4
from tests.stand_in_device import Watch, stand_in, watched
from tests.waiting import until

PROMPTS = [one.prompt for task in TASKS for one in samples(task, 2, seed=5)]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SHORT = [prompt[:60] for prompt in PROMPTS[:3]]
MIXED = [
    SamplingParams(temperature=0, max_tokens=4, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=4, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=1.0, seed=2, top_k=20, top_p=0.9, max_tokens=4, ignore_eos=True),
]


@contextmanager
def _watched_gpu() -> Iterator[Watch]:
    """torch tells of what blocks, in whatever thread."""
    watch = Watch()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield watch
        finally:
            torch.cuda.set_sync_debug_mode("default")
            found = [str(one.message) for one in told if "synchroniz" in str(one.message)]
            watch.blocking += [message for message in found if "prototype" not in message]


class Device:
    """Where models run. ``watch`` reports what blocks."""

    def __init__(self, kind: str, cache: Path) -> None:
        self.watch: Callable[[], AbstractContextManager[Watch]] = watched if kind == "stand-in" else _watched_gpu
        self.kind = kind
        self._cache = cache

    def llm(self, memory: str, host: str = "0%", **options: Any) -> LLM:
        return LLM(
            device="cuda", expert_memory=memory, host_memory=host, warm_start=False, cache_dir=self._cache, **options
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(
    params=[
        "stand-in",
        pytest.param(
            "gpu",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU here"),
            ],
        ),
    ]
)
def device(request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    if request.param == "gpu":
        yield Device("gpu", cache)
        return
    with stand_in(monkeypatch) as accelerator:
        yield Device("stand-in", cache)
    assert accelerator.wrong == []
    assert not accelerator.locked, "all pages are given free"


def texts(llm: LLM, prompts: list[str], sampling: Any = GREEDY) -> list[str]:
    return [completion.text for completion in llm.generate(prompts, sampling, progress=False)]


@pytest.mark.parametrize(
    ("memory", "host", "policy"),
    [
        pytest.param("100%", "0%", "look-ahead", marks=pytest.mark.full),
        pytest.param("25%", "0%", "look-ahead", marks=pytest.mark.full),
        ("25%", "100%", "look-ahead"),
        ("25%", "0%", LITERAL),
    ],
)
def test_a_step_waits_once_a_layer_and_once_for_its_tokens(
    device: Device, tmp_path: Path, memory: str, host: str, policy: str
) -> None:
    """For the picks of each layer, and for the tokens of all rows, whatever is sampled and predicted."""
    options = {}
    if policy == LITERAL:
        options["expert_mlp"] = tmp_path / "expert_mlp.safetensors"
        mlp_file([16] * 6, 2).write(options["expert_mlp"])
    with device.llm(memory, host, policy=policy, **options) as llm:
        texts(llm, PROMPTS[:3])  # whatever is made once
        engine, before = llm.worker.experts, llm.worker.experts.counters.steps
        with device.watch() as watch:
            for sampling in MIXED:
                texts(llm, PROMPTS[:3], sampling)
        steps = engine.counters.steps - before
        assert steps >= 12
        assert memory == "100%" or engine.counters.prefetches_used > 0, "what is predicted is said in time"
        assert len(watch.blocking) == steps * (engine.catalogue.layers + 1), sorted(set(watch.blocking))


def test_a_step_whose_rows_are_confined_waits_no_more_often(device: Device) -> None:
    """Which rows were given other experts travels with the picks."""
    with device.llm("25%", "100%", fidelity="paper") as llm:
        texts(llm, PROMPTS[:2])
        engine, before = llm.worker.experts, llm.worker.experts.counters.steps
        with device.watch() as watch:
            (first, *_) = llm.generate(PROMPTS[:2], GREEDY, progress=False)
        assert first.approximated > 0
        assert len(watch.blocking) == (engine.counters.steps - before) * (engine.catalogue.layers + 1)


def test_what_the_rows_of_a_later_chunk_may_see_needs_no_wait(device: Device) -> None:
    with device.llm("25%", prefill_chunk=7, tokens_per_step=16, max_running=4) as llm:
        texts(llm, PROMPTS[:2])
        model, later = llm.worker.loop.engine.model, [0]
        forward = model.forward

        def counted(chunks: Any, *paths: Any) -> torch.Tensor:
            later[0] += any(chunk.kv.length and len(chunk.tokens) > 1 for chunk in chunks)
            return forward(chunks, *paths)

        model.forward = counted  # type: ignore[method-assign, assignment]
        with device.watch() as watch:
            texts(llm, PROMPTS[:2])
        assert later[0] > 0
        waits = {where.rpartition(" at ")[2].rpartition(":")[0] for where in watch.blocking}
        assert waits == {"moe/kernels/experts_forward.py", "moe/batch/device_sampling.py"}, "picks and logits alone"


def test_where_the_device_holds_all_experts_no_layer_is_booked(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    booked: list[object] = []
    with device.llm("100%", policy="lru") as llm:
        texts(llm, PROMPTS[:1])
        policy = llm.worker.experts.policy
        monkeypatch.setattr(policy, "on_layer_routed", booked.append)
        hits = llm.worker.experts.counters.hits
        texts(llm, PROMPTS[:1])
        assert llm.worker.experts.counters.hits > hits
        assert booked == []


@pytest.mark.full
def test_logits_are_equal_to_the_bit_at_three_budgets(device: Device) -> None:
    seen: list[list[torch.Tensor]] = []
    for memory, host in (("100%", "0%"), ("50%", "100%"), ("25%", "0%")):
        with device.llm(memory, host) as llm:
            model = llm.worker.loop.engine.model
            forward = model.forward
            rows: list[torch.Tensor] = []

            def noted(
                chunks: Any, paths: Any = None, forward: Any = forward, rows: list[torch.Tensor] = rows
            ) -> torch.Tensor:
                logits: torch.Tensor = forward(chunks, paths)
                rows.append(logits.cpu())
                return logits

            model.forward = noted  # type: ignore[method-assign]
            for prompt in PROMPTS[:3]:
                texts(llm, [prompt])
            seen.append(rows)
    first, *others = seen
    assert len(first) >= 15
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


class RingByTorch(ExpertRing):
    """Launches as on a GPU. Each expert of one is expanded by torch, which the stand-in has."""

    launches: ClassVar[list[int]] = []

    def __init__(self, expert_format: ExpertFormat, layer: MoeLayer, device: torch.device | None) -> None:
        super().__init__(expert_format, layer, device or torch.device("cpu"))
        self._each = [Expander(expert_format, layer) for _ in range(self.places)]

    def expand(self, records: Sequence[ExpertWeights]) -> list[ExpertWeights]:
        self.launches.append(len(records))
        return [one(weights) for one, weights in zip(self._each, records, strict=False)]


def test_experts_stay_as_they_are_stored(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expanded on the device, one at a time or those that have arrived together. No step waits for that."""
    folder = save_mxfp4(tmp_path / "model", tokenizer=True)
    seen = []
    for kept, memory, together in (("expanded", "100%", False), ("stored", "100%", False), ("stored", "25%", True)):
        if together and device.kind == "stand-in":
            monkeypatch.setattr("greenroom.moe.kernels.expert_hooks.expander_for", RingByTorch)
            RingByTorch.launches.clear()
        with device.llm(memory, model=str(folder), experts_as=kept) as llm:
            texts(llm, SHORT[:1])
            engine, before = llm.worker.experts, llm.worker.experts.counters.steps
            with device.watch() as watch:
                found = texts(llm, SHORT)
            assert len(watch.blocking) == (engine.counters.steps - before) * (engine.catalogue.layers + 1)
            assert llm.worker.pack.manifest.formats == ("mxfp4" if kept == "stored" else "plain",)
            rings = [isinstance(one, ExpertRing) for one in llm.worker.hooks.expanders.values()]
            assert rings == ([] if kept == "expanded" else [together or device.kind == "gpu"])
            seen.append(found)
    assert device.kind == "gpu" or {1, 2} <= set(RingByTorch.launches)
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) > 1


@pytest.mark.full
def test_prompts_longer_than_a_chunk(device: Device) -> None:
    long = [prompt * 4 for prompt in PROMPTS[:3]]
    found = []
    for memory in ("100%", "25%"):
        with device.llm(memory, prefill_chunk=7, tokens_per_step=16, max_running=8) as llm:
            completions = llm.generate(long, GREEDY, progress=False)
            assert all(len(completion.prompt_token_ids) > 14 for completion in completions)
            stats = llm.worker.loop.stats()
            assert stats.prefill_rows == sum(len(completion.prompt_token_ids) for completion in completions)
            assert stats.steps > stats.prefill_rows // 16
            found.append([completion.text for completion in completions])
    assert found[0] == found[1]


def test_requests_wait_for_kv_and_all_are_answered(device: Device) -> None:
    with device.llm("25%", "50%", kv_memory="256KiB") as llm:
        prompts = PROMPTS * 2
        completions = llm.generate(prompts, GREEDY, progress=False)
        assert [len(completion.token_ids) for completion in completions] == [6] * len(prompts)
        stats = llm.worker.loop.stats()
        assert stats.kv_peak_bytes <= stats.kv_budget_bytes
        assert stats.queue_seconds > 0
        llm.worker.loop.engine.kv.audit()


def test_a_step_without_memory_costs_only_the_request_that_asked_for_it(device: Device) -> None:
    with device.llm("25%") as llm:
        alone = texts(llm, PROMPTS[:1])
        model = llm.worker.loop.engine.model
        forward = model.forward

        def greedy_for_memory(chunks: Any, *paths: Any) -> torch.Tensor:
            if any(len(chunk.tokens) > 60 for chunk in chunks):
                torch.empty(1 << 50, dtype=torch.uint8, device=model.device)
            return forward(chunks, *paths)

        model.forward = greedy_for_memory  # type: ignore[method-assign, assignment]
        with pytest.raises(GenerationFailed, match=r"internal error|memory"):
            texts(llm, [PROMPTS[0] * 20])
        assert texts(llm, PROMPTS[:1]) == alone
        llm.worker.experts.audit(idle=True)


@pytest.mark.parametrize("host", [pytest.param("0%", marks=pytest.mark.full), "100%"])
def test_after_copies_that_fail_the_text_is_right(device: Device, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with device.llm("25%", host, policy="lru") as llm:
        right = [texts(llm, [prompt]) for prompt in PROMPTS[:3]]
        accelerator: Any = llm.worker.accelerator
        copy, calls = accelerator.copy, [0]

        def troubled(*args: Any, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] % 5 == 0:
                raise RuntimeError("injected: the copy was not queued")
            return copy(*args, **kwargs)

        monkeypatch.setattr(accelerator, "copy", troubled)
        for prompt, wanted in zip(PROMPTS[:3], right, strict=True):
            with contextlib.suppress(GenerationFailed):
                assert texts(llm, [prompt]) == wanted
        monkeypatch.setattr(accelerator, "copy", copy)
        assert [texts(llm, [prompt]) for prompt in PROMPTS[:3]] == right
        assert llm.worker.experts.counters.failed_transfers > 0
        llm.worker.experts.audit()


class SlowDisk:
    """A link in the place of the measured one."""

    def seconds(self, nbytes: int) -> float:
        return 1.0


async def test_the_host_is_filled_whatever_the_policy_and_makes_a_load_cheap(device: Device) -> None:
    with device.llm("25%", "100%", policy="lru") as llm:
        texts(llm, PROMPTS[:1])
        experts: Any = llm.worker.experts
        await until(lambda: int(experts.host.resident.sum()) == experts.catalogue.size, "all experts are on the host")
        llm.worker.link = SlowDisk()  # type: ignore[assignment]
        state = ModelEngine(llm.worker).state()
        assert 0 < state.expert_load_ms < 500, "no expert needs the disk"


async def test_a_load_takes_the_disk_for_the_share_that_is_not_on_the_host(device: Device) -> None:
    with device.llm("25%", "50%", policy="lru") as llm:
        texts(llm, PROMPTS[:1])
        experts: Any = llm.worker.experts

        def costs_that() -> bool:
            absent = ~experts.device.resident
            share = (absent & ~experts.host.resident).sum() / absent.sum()
            told = experts.load_seconds(1.0) - experts.load_seconds(0.0)
            return bool(0 < share < 1 and told == pytest.approx(share))

        await until(costs_that, "a second of the disk counts as much as it is needed")


def test_a_load_costs_what_the_disk_takes_where_there_is_no_host_tier(device: Device) -> None:
    with device.llm("25%") as llm:
        llm.worker.link = SlowDisk()  # type: ignore[assignment]
        assert ModelEngine(llm.worker).state().expert_load_ms == 1000
