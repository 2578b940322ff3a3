"""Routing paths in the batch engine: asked once a row, handed to policy and forward, and never in a token's way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from greenroom.core.errors import InvalidConfig
from greenroom.core.generation import Event, Finished, FinishReason
from greenroom.moe.attention.ragged_attention import Chunk
from greenroom.moe.batch.batch_config import BatchConfig
from greenroom.moe.batch.batch_engine import BatchEngine
from greenroom.moe.batch.batch_loop import BatchLoop
from greenroom.moe.batch.sequence import OnEvent
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.batching.batch_policy import BatchDecision, BatchState, Rows, StepPlan
from greenroom.policies.batching.fcfs import FcfsBatching
from greenroom.policies.expertflow.token_scheduler import TokenScheduler
from tests.contract.batching.harness import Answer, Driver, request
from tests.unit.batching.fake_model import FakeModel, continuation, poisoned

PROMPTS = [(5, 6), (7, 8, 9), (10,), (11, 12, 13, 14)]
EXPERTS = 6


def path_of(sequence: int, position: int, token: int) -> list[float]:
    """Tells all three."""
    return [((sequence + 1) * 7 % 10) / 10, (position % 20) / 20, token / 64, 0, 0, 1]


class Foretells(TokenPaths):
    def __init__(self) -> None:
        self.begun: dict[int, list[int]] = {}
        self.asked: list[tuple[int, int, int]] = []
        self.ended: list[int] = []
        self.picked_rows: list[tuple[int, int, int]] = []

    def begin(self, sequence: int, prompt: Ids) -> None:
        assert sequence not in self.begun
        self.begun[sequence] = prompt.tolist()

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        rows = list(zip(sequences.tolist(), positions.tolist(), tokens.tolist(), strict=True))
        self.asked += rows
        return np.array([path_of(*row) for row in rows], dtype=np.float32)

    def picked(self, sequences: Ids, positions: Ids, picks: np.ndarray) -> None:
        self.picked_rows += zip(sequences.tolist(), positions.tolist(), picks.ravel().tolist(), strict=True)

    def end(self, sequence: int) -> None:
        self.ended.append(sequence)


class Noting(FcfsBatching):
    """Reads paths, and notes them."""

    reads_paths = True

    def __init__(self) -> None:
        self.told: list[dict[int, list[float]]] = []
        self.seen: list[object] = []

    def decide(self, state: BatchState) -> BatchDecision:
        paths = state.paths
        if paths is not None:
            self.seen.append(paths.chances)
            self.told.append(dict(zip(paths.sequences.tolist(), paths.chances.tolist(), strict=True)))
        return super().decide(state)


def driven(paths: TokenPaths | None, model: FakeModel | None = None, **options: Any) -> tuple[FakeModel, Driver]:
    model = model or FakeModel()
    return model, Driver(model.as_ragged(), paths=paths, tokens_per_step=16, **options)


def run(driver: Driver, tokens: int = 5) -> list[Answer]:
    answers = [driver.add(request(f"r{place}", prompt, tokens)) for place, prompt in enumerate(PROMPTS)]
    driver.run()
    return answers


def assert_unharmed(answers: Sequence[Answer], tokens: int = 5) -> None:
    assert [answer.ids for answer in answers] == [continuation(prompt, tokens) for prompt in PROMPTS]


@pytest.mark.parametrize("policy", [FcfsBatching, Noting, TokenScheduler])
@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("chunk", [None, 2])
def test_each_row_is_asked_for_once_and_its_forward_has_the_answer(
    policy: type[FcfsBatching], rows: int | None, chunk: int | None
) -> None:
    source = Foretells()
    model, driver = driven(source, policy=policy(), rows_per_forward=rows, prefill_chunk=chunk)

    assert_unharmed(run(driver))

    said = {number: [*prompt, *continuation(prompt, 4)] for number, prompt in enumerate(PROMPTS)}
    assert source.begun == {number: list(prompt) for number, prompt in enumerate(PROMPTS)}
    assert sorted(source.asked) == sorted((n, place, token) for n in said for place, token in enumerate(said[n]))
    assert sorted(source.ended) == list(said)
    behind = dict.fromkeys(said, 0)
    for forward, paths in zip(model.forwards, model.paths, strict=True):
        wanted = []
        for number, count in forward:
            places = range(behind[number], behind[number] + count)
            wanted += [path_of(number, place, said[number][place]) for place in places]
            behind[number] += count
        assert np.allclose(np.asarray(paths), wanted)
    assert driver.engine.stats.path_failures == 0


@pytest.mark.parametrize("rows", [None, 2])
def test_what_each_row_picked_is_told_once_with_its_place(rows: int | None) -> None:
    """A pick here is the number of its forward and row, so that one told of another row shows."""
    source, model = Foretells(), FakeModel()

    def picks() -> np.ndarray:
        count = sum(tokens for _, tokens in model.forwards[-1])
        return len(model.forwards) * 100 + np.arange(count).reshape(count, 1, 1)

    model, driver = driven(source, model, picks=picks, rows_per_forward=rows, prefill_chunk=2)
    assert_unharmed(run(driver))

    behind: dict[int, int] = {}
    wanted = []
    for number, forward in enumerate(model.forwards, 1):
        row = 0
        for sequence, tokens in forward:
            for _ in range(tokens):
                wanted.append((sequence, behind.setdefault(sequence, 0), number * 100 + row))
                behind[sequence] += 1
                row += 1
    assert source.picked_rows == wanted


def test_a_source_that_can_not_take_picks_costs_no_token() -> None:
    class Refuses(Foretells):
        def picked(self, sequences: Ids, positions: Ids, picks: np.ndarray) -> None:
            raise RuntimeError("no")

    model = FakeModel()
    _, driver = driven(Refuses(), model, picks=lambda: np.zeros((sum(n for _, n in model.forwards[-1]), 1, 1), int))
    assert_unharmed(run(driver))
    assert driver.engine.stats.path_failures == 3, "then it is given up"


def test_a_sequence_that_can_not_be_begun_harms_no_other() -> None:
    """Its own rows have no chances; the source goes on."""

    class Refuses(Foretells):
        def begin(self, sequence: int, prompt: Ids) -> None:
            if sequence == 1:
                raise RuntimeError("no")
            super().begin(sequence, prompt)

    source = Refuses()
    model, driver = driven(source)
    assert_unharmed(run(driver))

    assert {sequence for sequence, _, _ in source.asked} == {0, 2, 3}
    assert all(paths is not None for paths in model.paths)
    of_refused = [
        paths[row]
        for forward, paths in zip(model.forwards, model.paths, strict=True)
        for row, sequence in enumerate(number for number, count in forward for _ in range(count))
        if sequence == 1 and isinstance(paths, np.ndarray)
    ]
    assert len(of_refused) == len(PROMPTS[1]) + 4
    assert not np.any(of_refused)
    assert driver.engine.stats.path_failures == 1
    assert sorted(source.ended) == [0, 2, 3]


def test_an_answer_of_other_experts_than_before_is_none() -> None:
    class Changes(Foretells):
        def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
            found = super().chances(sequences, positions, tokens)
            return found if len(self.asked) < 12 else found[:, :-1]

    model, driver = driven(Changes())
    assert_unharmed(run(driver))
    assert driver.engine.stats.path_failures == 3, "then it is given up"
    assert model.paths[-1] is None


def test_a_policy_that_reads_paths_has_those_of_all_that_decode_before_it_decides() -> None:
    policy = Noting()
    model, driver = driven(Foretells(), policy=policy)
    driver.add(request("a", (5, 6), 3))
    driver.step()
    driver.step()
    token = continuation((5, 6), 1)[0]
    assert policy.told == [{0: pytest.approx(path_of(0, 2, token))}]
    assert model.paths[-1] is policy.seen[-1], "one array for both"


def test_rows_that_run_again_alone_keep_their_paths_and_are_not_asked_for_again() -> None:
    source = Foretells()
    model, driver = driven(source, FakeModel(poisoned(60, RuntimeError("no"))))
    ill = driver.add(request("ill", (60, 1), 3))
    well = driver.add(request("well", (5, 6, 7), 3))
    driver.run()
    assert ill.finished is not None
    assert ill.finished.reason is FinishReason.FAILED
    assert well.ids == continuation((5, 6, 7), 3)
    together, *alone = (np.asarray(paths) for paths in model.paths[:3])
    assert np.array_equal(together, np.concatenate(alone))
    assert len(source.asked) == len(set(source.asked))


class Failing(Foretells):
    def __init__(self, fails: range, how: str) -> None:
        super().__init__()
        self.calls = -1
        self.fails = fails
        self.how = how

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        self.calls += 1
        found = super().chances(sequences, positions, tokens)
        if self.calls not in self.fails:
            return found
        if self.how == "raises":
            raise RuntimeError("a predictor's own fault")
        return found[:, :, None] if self.how == "shape" else found[1:]


@pytest.mark.parametrize("how", ["raises", "shape", "rows"])
@pytest.mark.parametrize("policy", [FcfsBatching, TokenScheduler])
def test_a_source_that_fails_costs_predictions_and_never_a_token(how: str, policy: type[FcfsBatching]) -> None:
    source = Failing(range(1, 3), how)
    model, driver = driven(source, policy=policy(), rows_per_forward=2)
    assert_unharmed(run(driver))
    assert driver.engine.stats.path_failures == 2
    assert any(paths is None for paths in model.paths)
    assert model.paths[-1] is not None, "it is asked again"


def test_after_three_failures_in_a_row_it_is_given_up_until_another_version_is_swapped_in() -> None:
    broken, sound = Failing(range(1000), "raises"), Foretells()
    model, driver = driven(broken)
    answer = driver.add(request("a", (5, 6), 12))
    for _ in range(6):
        driver.step()
    assert (driver.engine.stats.path_failures, broken.calls) == (3, 2)
    driver.engine.swap_paths(sound)
    driver.run()
    assert answer.ids == continuation((5, 6), 12)
    assert sound.begun == {0: [5, 6, *continuation((5, 6), 5)]}, "what was said before"
    assert model.paths[-1] is not None
    assert driver.engine.stats.path_failures == 3


@pytest.mark.parametrize("method", ["begin", "end"])
def test_a_source_that_can_not_begin_or_end_costs_no_token(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no")

    source = Foretells()
    monkeypatch.setattr(source, method, fails)
    _, driver = driven(source)
    assert_unharmed(run(driver))
    assert driver.engine.stats.path_failures >= 1


def test_no_number_and_numbers_beyond_a_chance_are_mended() -> None:
    class Odd(Foretells):
        def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
            return np.tile(np.array([np.nan, 2, -1, 0.5], dtype=np.float32), (len(sequences), 1))

    model, driver = driven(Odd())
    assert_unharmed(run(driver))
    assert np.array_equal(np.asarray(model.paths[-1])[0], [0, 1, 0, 0.5])


def test_the_time_of_foretelling_and_of_deciding_is_counted() -> None:
    ticks = iter(range(100_000))
    _, driver = driven(Foretells(), clock=lambda: float(next(ticks)))
    run(driver)
    stats = driver.engine.stats
    assert stats.decide_seconds >= stats.steps
    assert stats.paths_seconds >= stats.steps


def test_only_a_policy_that_plans_rounds_takes_more_requests_than_rows() -> None:
    config = BatchConfig(1 << 20, tokens_per_step=2, max_running=4, plans_rounds=True)
    with pytest.raises(InvalidConfig, match="plans_rounds"):
        BatchEngine(FakeModel().as_ragged(), config)
    model = FakeModel()
    driver = Driver(
        model.as_ragged(),
        tokens_per_step=2,
        max_running=4,
        plans_rounds=True,
        policy=TokenScheduler(),
        paths=Foretells(),
    )
    assert_unharmed(run(driver))
    assert max(len(forward) for forward in model.forwards) == 2
    assert len(driver.engine.running) == 0


def test_a_cancel_and_a_pause_are_served_between_forwards_planned_together() -> None:
    """Of the two forwards of a round, the first one's rows run while the other's sequence is cancelled."""
    model = FakeModel()
    engine = BatchEngine(model.as_ragged(), BatchConfig(1 << 20, rows_per_forward=1))
    loop = BatchLoop(engine)
    pauses: list[int] = []
    loop.between_steps = lambda: pauses.append(len(model.forwards))
    told: dict[str, list[Event]] = {"a": [], "b": []}
    ended = {name: threading.Event() for name in told}

    def taker(name: str) -> OnEvent:
        def take(event: Event) -> None:
            told[name].append(event)
            if isinstance(event, Finished):
                ended[name].set()

        return take

    def cancel(chunks: Sequence[Chunk]) -> None:
        if len(told["b"]) == 1:
            loop.cancel(1)

    model.before = cancel
    model.gate.clear()
    loop.start()
    try:
        for name in told:
            loop.submit(request(name, (5, 6), 9), taker(name))
            assert model.entered.wait(30)
        model.gate.set()
        assert all(each.wait(30) for each in ended.values())
    finally:
        loop.stop()
    rows = [[sequence for sequence, _ in forward] for forward in model.forwards]
    assert rows == [[0], [0, 1], *[[0]] * 7], "b has its prompt's rows, and none after its cancel"
    assert set(range(len(rows) + 1)) <= set(pauses)


def test_a_prompt_planned_over_two_forwards_is_asked_for_in_its_order() -> None:
    """No policy here does so; the engine would carry it out."""

    class InTwo(FcfsBatching):
        def decide(self, state: BatchState) -> BatchDecision:
            decision = super().decide(state)
            if not state.waiting:
                return decision
            number = state.waiting[0].sequence
            steps = tuple(StepPlan((Rows(number, 2, Phase.PREFILL),)) for _ in range(2))
            return BatchDecision(steps, admit=(number,))

    source = Foretells()
    model, driver = driven(source, policy=InTwo())
    answer = driver.add(request("a", (11, 12, 13, 14), 3))
    driver.run()
    assert answer.ids == continuation((11, 12, 13, 14), 3)
    assert [position for _, position, _ in source.asked] == list(range(6))
    assert model.plans[0] == (0, [(0, [13, 14])])
