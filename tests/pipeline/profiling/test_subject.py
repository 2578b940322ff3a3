"""A real model under the profile's own measurements: what they do to it, and that it is whole afterwards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import Event, GenerationRequest, SamplingParams, Token
from greenroom.core.machine import machine_name
from greenroom.policies.base.events import SequenceEnd, SequenceInfo
from greenroom.profiling.measures.costs import crowd_of, measure_costs, turns_of
from greenroom.profiling.measures.lengths import counts_of
from greenroom.profiling.measures.pick_worth import measure_pick_worth
from greenroom.profiling.measures.pick_worth import turns_of as worth_turns_of
from greenroom.profiling.measures.sensitivity import disturb
from greenroom.profiling.measures.similarity import TokenOverlap
from greenroom.profiling.model.confinement import KeptExperts, RandomRouting
from greenroom.profiling.model.profiled_model import Answer, Asked, ProfileFailed, Subject
from greenroom.profiling.model.teacher_forcing import Given, force, perplexity
from greenroom.profiling.prompts import TaskPrompt
from greenroom.replay.traces.recorder import TraceRecorder
from greenroom.worker.model.config import WorkerConfig
from tests.random_checkpoints import save_random

TEXTS = ["one two three", "four", "five six seven eight nine", "ten eleven twelve"]
LIMIT = 12


@pytest.fixture(scope="module", params=["olmoe", "qwen3_moe"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    root = tmp_path_factory.mktemp("subject")
    folder = save_random(request.param, root / "m", tokenizer=True)
    config = WorkerConfig(
        model=str(folder), cache_dir=root / "cache", warm_start=False, threads=1, max_running=3, tokens_per_step=9
    )
    with Subject(config) as subject:
        yield subject


@pytest.fixture
def asked(subject: Subject) -> list[Asked]:
    prompts = [TaskPrompt(text, f"task {place % 2}") for place, text in enumerate(TEXTS)]
    asked, left_out = subject.tokenised(prompts, LIMIT)
    assert left_out == 0
    return asked


def said(subject: Subject, asked: list[Asked]) -> list[Answer]:
    return subject.answers(asked, [LIMIT] * len(asked))


class Observer:
    """Hears of sequences."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def sequence_queued(self, sequence: SequenceInfo) -> None:
        self.heard.append(f"queued {sequence.task}")

    def sequence_preempted(self, sequence: SequenceInfo) -> None:
        raise AssertionError("all rows are reserved")

    def sequence_started(self, sequence: SequenceInfo) -> None:
        self.heard.append(f"started {sequence.task}")

    def sequence_ended(self, sequence: int, end: SequenceEnd) -> None:
        self.heard.append(end.value)

    def approximated(self, sequence: int, rows: int) -> float:
        return rows / 100

    def idle(self) -> bool:
        return False

    def audit_idle(self) -> None: ...


def test_given_answers_are_as_probable_as_when_the_model_gave_them(subject: Subject, asked: list[Asked]) -> None:
    events: dict[int, list[Event]] = {one.place: [] for one in asked}
    for one in asked:
        sampling = SamplingParams(temperature=0.9, seed=one.place, max_tokens=LIMIT, ignore_eos=True, logprobs=0)
        request = GenerationRequest(f"r{one.place}", one.prompt_ids, sampling)
        subject.engine.add(subject.engine.new_sequence(request, events[one.place].append))
    while subject.engine.busy:
        subject.step()
    tokens = [[event for event in events[one.place] if isinstance(event, Token)] for one in asked]
    given = [
        Given(one.prompt_ids, [token.token_id for token in own], one.task)
        for one, own in zip(asked, tokens, strict=True)
    ]
    observer = Observer()
    began: dict[int, int] = {}
    forced = force(subject.engine, given, observer=observer, begun=lambda place, number: began.update({place: number}))
    for own, result in zip(tokens, forced, strict=True):
        chosen = [token.logprobs.chosen for token in own if token.logprobs is not None]
        assert result.log_probabilities == pytest.approx(chosen, abs=2e-2)
        assert (result.log_probabilities[result.agreed] > math.log(1 / subject.worker.served.vocab_size)).all()
    everything = np.concatenate([one.log_probabilities for one in forced])
    assert perplexity(forced) == pytest.approx(math.exp(-everything.mean()))
    assert not all(one.agreed.all() for one in forced), "they were sampled, not greedy"
    assert sorted(began) == [0, 1, 2, 3]
    assert [one.approximated for one in forced] == [
        (len(one.prompt_ids) + len(one.answer_ids) - 1) / 100 for one in given
    ]
    assert sorted(observer.heard) == sorted(
        [f"{what} {one.task}" for one in asked for what in ("queued", "started")] + ["finished"] * 4
    )
    subject.engine.audit()


def test_greedy_answers_are_all_agreed_with(subject: Subject, asked: list[Asked]) -> None:
    given = [Given(one.prompt_ids, answer.token_ids) for one, answer in zip(asked, said(subject, asked), strict=True)]
    assert np.concatenate([one.agreed for one in force(subject.engine, given)]).mean() > 0.95


def test_what_does_not_fit_is_refused_and_nothing_is_held(subject: Subject) -> None:
    long = Given([3] * 10, [4] * subject.engine.kv.max_rows)
    with pytest.raises(InvalidRequest, match="does not fit"):
        force(subject.engine, [Given([3, 4], [5]), long])
    subject.engine.audit()
    assert len(subject.engine.kv) == 0


def test_rows_that_may_go_anywhere_go_where_they_would(subject: Subject, asked: list[Asked]) -> None:
    before = said(subject, asked)
    masks = dict.fromkeys(range(100_000), np.ones(subject.catalogue.size, dtype=np.bool_))
    subject.policy.confine(KeptExperts(subject.catalogue, masks))
    free = said(subject, asked)
    assert subject.policy.confine(None) > 0
    assert free == before
    assert said(subject, asked) == before


def test_random_routing_changes_answers_the_same_way_each_time(subject: Subject, asked: list[Asked]) -> None:
    before = said(subject, asked)

    def disturbed(layers: int, seed: int) -> list[Answer]:
        names: dict[int, int] = {}
        subject.policy.confine(RandomRouting(subject.catalogue, layers, seed=seed, names=names))
        answers = subject.answers(asked, [LIMIT] * len(asked), places=names)
        subject.policy.confine(None)
        return answers

    assert disturbed(0, 1) == before
    every = disturbed(subject.catalogue.layers, 1)
    assert every != before
    assert disturbed(subject.catalogue.layers, 1) == every
    assert disturbed(subject.catalogue.layers, 2) != every
    assert said(subject, asked) == before


def test_what_is_routed_at_random_is_never_an_expert_that_was_not_drawn(subject: Subject, asked: list[Asked]) -> None:
    names: dict[int, int] = {}
    routing = RandomRouting(subject.catalogue, subject.catalogue.layers, seed=3, names=names)
    subject.policy.confine(routing)
    recorder = subject.worker.experts.listener = TraceRecorder(subject.catalogue)
    subject.answers(asked, [4] * len(asked), places=names)
    subject.worker.experts.listener = None
    subject.policy.confine(None)
    trace = recorder.trace()
    numbers = sorted(names)
    assert trace.sequences == len(numbers)
    for place, number in enumerate(numbers):
        picks = trace.experts[trace.seq_starts[place] : trace.seq_starts[place + 1]].astype(np.int64)
        positions = np.arange(len(picks))
        for layer in range(trace.layers):
            drawn = routing.mask(np.full(len(picks), number), positions, layer)
            assert drawn is not None
            expected = [np.flatnonzero(row).tolist() for row in drawn]
            assert [sorted(row) for row in picks[:, layer].tolist()] == expected


def test_sensitivity_of_answers_that_nothing_disturbs_is_none(subject: Subject, asked: list[Asked]) -> None:
    asked = asked[:2]
    answers = said(subject, asked)
    turns = []
    disturbed = disturb(
        subject,
        asked,
        answers,
        seeds=3,
        seed=0,
        most_tokens=LIMIT,
        similarity=TokenOverlap(),
        answered=lambda: turns.append(1),
    )
    assert len(turns) == 3 * subject.catalogue.layers * len(asked)
    assert disturbed.similarity.shape == (3, subject.catalogue.layers + 1, len(asked))
    assert (disturbed.similarity[:, 0] == 1).all()
    assert disturbed.similarity[:, -1].mean() < 1
    assert np.isnan(disturbed.right).all()
    assert said(subject, asked) == answers, "what was disturbed is put right"


def test_the_worth_of_picks_is_what_answers_lose_without_them(subject: Subject, asked: list[Asked]) -> None:
    answers = said(subject, asked)
    given = [answer.token_ids for answer in answers]
    recorder = subject.worker.experts.listener = TraceRecorder(subject.catalogue)
    assert said(subject, asked) == answers
    subject.worker.experts.listener = None
    counts = [counts_of(recorder.trace(), [place]) for place in range(len(asked))]
    turns = []
    found = measure_pick_worth(
        subject, asked, given, counts, prompts=2, seed=0, done=lambda: turns.append(1)
    )  # fmt: skip
    assert len(turns) == worth_turns_of(subject.catalogue, [2, 2], 2)
    assert set(found) == {"task 0", "task 1"}
    for task, worth in found.items():
        own = [place for place, one in enumerate(asked) if one.task == task]
        used = np.sum([counts[place] for place in own], axis=0) > 0
        assert (np.array(worth.loss)[~used] == 0).all(), "nothing is lost with an expert that was not picked"
        layer, expert = np.unravel_index(np.argmax(worth.loss), used.shape)
        expected = lost_without(subject, [(asked[place], given[place]) for place in own], int(layer), int(expert))
        assert worth.loss[layer][expert] == pytest.approx(expected, rel=1e-3)
        assert expected > 0
    assert said(subject, asked) == answers, "the model is as it was"


def lost_without(subject: Subject, said: list[tuple[Asked, tuple[int, ...]]], layer: int, expert: int) -> float:
    """Nats a token that are lost when the expert is masked for all sequences."""
    given = [Given(one.prompt_ids, answer, one.task) for one, answer in said]
    kept = np.ones(subject.catalogue.size, dtype=np.bool_)
    before = force(subject.engine, given)
    kept[subject.catalogue.first[layer] + expert] = False
    subject.policy.confine(KeptExperts(subject.catalogue, defaultdict(lambda: kept)))
    after = force(subject.engine, given)
    subject.policy.confine(None)
    return float(
        np.concatenate([one.log_probabilities for one in before]).mean()
        - np.concatenate([one.log_probabilities for one in after]).mean()
    )


def test_a_crowd_of_prompts_has_as_many_tokens_as_are_wanted_where_so_many_prompts_run(
    subject: Subject, asked: list[Asked]
) -> None:
    whole = sum(len(one.prompt_ids) for one in asked[:3])
    for rows in (1, 2, whole):
        assert sum(len(one.prompt_ids) for one in crowd_of(subject, asked, rows)) == rows
    assert sum(len(one.prompt_ids) for one in crowd_of(subject, asked, 10 * whole)) == whole, "three run at once"


def test_costs_are_measured_and_leave_the_model_as_it_was(subject: Subject, asked: list[Asked]) -> None:
    before = said(subject, asked)
    turns = []
    costs = measure_costs(subject, asked, rounds=2, steps=3, seed=0, done=lambda: turns.append(1))
    assert len(turns) == turns_of(subject, 2)
    assert list(costs.token_ms_by_rows) == [1, 2, 3]
    assert list(costs.load_ms_by_experts) == [1, 2, 4, 8]
    assert list(costs.prompt_step_ms) == sorted(costs.prompt_step_ms)
    assert {1, 2, 4} <= costs.prompt_step_ms.keys() <= set(range(1, 10))
    measured = (costs.token_ms_by_rows, costs.prompt_step_ms, costs.load_ms_by_experts)
    assert all(cost > 0 for figures in measured for cost in figures.values())
    assert costs.beside_prompts is not None
    assert costs.machine == machine_name()
    assert costs.prefill_token_ms > 0
    assert not subject.engine.busy
    subject.worker.experts.audit(idle=True)
    assert subject.worker.experts.device.resident.all()
    assert said(subject, asked) == before


def test_a_request_that_fails_is_named(subject: Subject, asked: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no forward today")

    with monkeypatch.context() as patch:
        patch.setattr(subject.engine.model, "forward", broken)
        with pytest.raises(ProfileFailed, match=r"1th prompt, of task 'task 0'.*internal error"):
            said(subject, asked)
    assert not subject.engine.busy


def test_a_third_of_the_experts_gives_the_same_answers_and_costs(tmp_path: Path) -> None:
    folder = save_random("olmoe", tmp_path / "m", tokenizer=True)
    prompts = [TaskPrompt(text, "t") for text in TEXTS]
    found = []
    for share in ("100%", "40%"):
        config = WorkerConfig(
            model=str(folder),
            cache_dir=tmp_path / "cache",
            warm_start=False,
            threads=1,
            max_running=2,
            expert_memory=share,
        )
        with Subject(config) as subject:
            asked, _ = subject.tokenised(prompts, LIMIT)
            answers = said(subject, asked)
            costs = measure_costs(subject, asked, rounds=1, steps=2, seed=0, done=lambda: None)
            assert costs.load_ms_by_experts
            assert subject.all_resident == (share == "100%")
            assert said(subject, asked) == answers
            found.append(answers)
    assert found[0] == found[1]
