"""However a collaboration is scheduled and whatever memory it has, its answers are those of all experts in memory."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from greenroom.coe.computing import images
from greenroom.coe.computing.expert_computer import Computed, ExpertComputer
from greenroom.coe.computing.inputs import Input
from greenroom.coe.serving.config import ServingConfig
from greenroom.coe.serving.outcomes import Outcome
from greenroom.coe.serving.runtime import CollaborationRuntime
from greenroom.coe.serving.selection import Selection
from greenroom.core.errors import BudgetTooSmall, InvalidRequest, PackDamaged
from greenroom.core.units import format_bytes
from greenroom.experts.pack.layout import ExpertWeights
from greenroom.policies.registry import MODEL_POLICIES
from greenroom.worker.collaboration.card import card_of
from tests.contract.coe.served_board import Board
from tests.matrices import matrix
from tests.random_experts import encoded, random_image
from tests.unit.coe.serving.scripted_collaboration import SELECTIONS
from tests.waiting import DEADLINE_S

EXECUTORS = 2
EVERY_POLICY = SELECTIONS | {
    policy: Selection("coserve", policy)
    for policy in MODEL_POLICIES
    if policy not in {own.policy for own in SELECTIONS.values()}
}
every_selection = pytest.mark.parametrize("name", SELECTIONS)


def config_of(board: Board, name: str, memory: str, **more: Any) -> ServingConfig:
    return ServingConfig(
        file=board.file,
        cache_dir=board.cache,
        selection=EVERY_POLICY[name],
        expert_memory=memory,
        **({"executors": EXECUTORS, "threads": torch.get_num_threads()} | more),
    )


def served(runtime: CollaborationRuntime, board: Board) -> list[Outcome]:
    """All samples at once."""
    outcomes: dict[int, Outcome] = {}
    count = threading.Semaphore(0)

    def told(place: int, outcome: Outcome) -> None:
        assert place not in outcomes, "once"
        outcomes[place] = outcome
        count.release()

    for place, sample in enumerate(board.samples):
        runtime.engine.submit(str(place), sample.image, sample.component, on_end=functools.partial(told, place))
    for _ in board.samples:
        assert count.acquire(timeout=DEADLINE_S), runtime.engine.failure
    return [outcomes[place] for place in range(len(board.samples))]


@matrix(1, budget=("least", "33%", "100%"), name=EVERY_POLICY.keys())
def test_answers_are_those_of_all_in_memory(
    board: Board, name: str, budget: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paths and labels of every sample. And the logits of every batch, to the bit, as the same batch has them there and
    in transformers' own model.
    """
    batches: list[tuple[int, Any, torch.Tensor]] = []
    forward = ExpertComputer.forward

    def watched(computer: ExpertComputer, expert: int, prepared: Any, weights: ExpertWeights) -> Any:
        outputs = forward(computer, expert, prepared, weights)
        batches.append((expert, prepared, outputs.logits.clone()))
        return outputs

    one_memory = EVERY_POLICY[name].one_memory
    memory = f"{422_000 * (1 if one_memory else EXECUTORS)}" if budget == "least" else budget
    before = set(threading.enumerate())
    with CollaborationRuntime(config_of(board, name, memory)) as runtime:
        monkeypatch.setattr(ExpertComputer, "forward", watched)
        outcomes = served(runtime, board)
        monkeypatch.undo()
        for memory_of in runtime.memories:
            memory_of.audit()
        loads = sum(memory_of.counters.loads for memory_of in runtime.memories)
        assert sum(memory_of.nbytes for memory_of in runtime.memories) == runtime.plan.experts
        assert loads > 0 or budget == "100%"
        assert loads == 0 or not (one_memory and budget == "100%")
    assert not {one for one in threading.enumerate() if one.name.startswith(("coe-", "mover"))} - before
    for sample, outcome in zip(board.samples, outcomes, strict=True):
        assert outcome.error is None
        assert outcome.path == sample.experts
        assert tuple(stage.result.label for stage in outcome.stages) == sample.labels
        for stage, alone in zip(outcome.stages, sample.said, strict=True):
            assert stage.result.scores == pytest.approx(alone.result.scores, abs=1e-5)
    for expert, prepared, logits in batches:
        own = forward(board.oracle.computer, expert, prepared, board.oracle.weights[expert]).logits
        assert torch.equal(logits, own)
        with torch.inference_mode():
            assert torch.equal(logits, board.own[expert](**prepared.tensors).logits)


@every_selection
def test_an_expert_that_does_not_fit_is_named(board: Board, name: str) -> None:
    with pytest.raises(
        BudgetTooSmall, match=r"expert 'resistor' alone takes .* the least that works is \d+ bytes"
    ) as told:
        CollaborationRuntime(config_of(board, name, "100KiB"))
    least = str(told.value).rsplit("is ", 1)[1].split()[0]
    with CollaborationRuntime(config_of(board, name, least)) as runtime:
        assert runtime.engine.alive


def test_intermediates_bound_the_batch(board: Board) -> None:
    with CollaborationRuntime(config_of(board, "pull", "100%", expert_share=0.9)) as runtime:
        assert runtime.plan.intermediates * EXECUTORS <= runtime.plan.experts / 0.9 * 0.1
        assert set(runtime.most.values()) < set(range(1, 16))
        assert all(len(outcome.stages) for outcome in served(runtime, board))
        assert max(runtime.engine.counters.batch_sizes) <= max(runtime.most.values())
    with pytest.raises(BudgetTooSmall, match="one request of expert"):
        CollaborationRuntime(config_of(board, "pull", "100%", expert_share=0.999))


def test_images_have_a_limit_and_their_memory_is_announced(board: Board) -> None:
    large = encoded(random_image(width=100, height=101))
    with CollaborationRuntime(config_of(board, "pull", "100%", max_pixels=10_000, most_batch=4)) as runtime:
        plan, told = runtime.plan, queue.Queue[Outcome]()
        assert plan.preparing == images.decoded_bytes(10_000) == 20 * 10_000
        assert plan.total == plan.experts + EXECUTORS * (plan.intermediates + plan.preparing)
        told_of = f"{format_bytes(plan.preparing)} for each executor, which reads an image of at most 10000 pixels"
        assert f"preparing       {told_of} at a time" in runtime.describe()
        assert f"memory          {format_bytes(plan.total)} in all" in runtime.describe()
        announced = card_of(runtime).collaboration
        assert announced is not None
        assert announced.max_pixels == 10_000
        runtime.engine.submit("1", large, board.samples[0].component, on_end=told.put)
        error = told.get(timeout=DEADLINE_S).error
        assert isinstance(error, InvalidRequest)
        assert "100 × 101 pixels; at most 10000 are taken" in str(error)
    with pytest.raises(BudgetTooSmall, match="--max-pixels"):
        CollaborationRuntime(
            config_of(board, "pull", "100%", max_pixels=10_000), available_bytes=plan.experts + 100_000
        )


def test_a_corrupt_record_fails_those_that_need_it(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    with CollaborationRuntime(config_of(board, "pull", "422000")) as runtime:
        broken = runtime.collaboration.graph.names.index("polarity")
        check = runtime.pack.check_pieces

        def altered(layer: int, expert: int, pieces: Sequence[memoryview]) -> None:
            if layer == broken:
                raise PackDamaged("polarity was altered")
            check(layer, expert, pieces)

        monkeypatch.setattr(runtime.pack, "check_pieces", altered)
        outcomes = served(runtime, board)
    for sample, outcome in zip(board.samples, outcomes, strict=True):
        assert (outcome.error is not None) == ("polarity" in sample.experts)
        assert outcome.path == tuple(one for one in sample.experts if one != "polarity")


def test_an_expert_without_numbers_fails_its_own(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN weights: only those requests that come to the expert have no answer."""
    compute = ExpertComputer.compute
    with CollaborationRuntime(config_of(board, "coserve", "100%")) as runtime:
        broken = runtime.collaboration.graph.names.index("keying")

        def spoilt(
            computer: ExpertComputer, expert: int, inputs: Sequence[Input], weights: ExpertWeights
        ) -> list[Computed]:
            if expert == broken:
                weights = tuple(torch.full_like(one, torch.nan) if one.is_floating_point() else one for one in weights)
            return compute(computer, expert, inputs, weights)

        monkeypatch.setattr(ExpertComputer, "compute", spoilt)
        outcomes = served(runtime, board)
    for sample, outcome in zip(board.samples, outcomes, strict=True):
        assert (outcome.error is not None) == ("keying" in sample.experts)
        assert "keying" not in sample.experts or "no finite number" in str(outcome.error)
