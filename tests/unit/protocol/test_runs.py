"""The worker's rules, one by one. docs/architecture/protocol.md has them by number."""

from __future__ import annotations

from dataclasses import replace

import pytest

from greenroom.core.attempts import Attempt
from greenroom.core.collaboration import InputKind
from greenroom.core.generation import Finished, FinishReason, SamplingParams, Token
from greenroom.core.inference import InferenceInput
from greenroom.core.messages import Inference, Request, Task
from greenroom.worker.runs.run_table import (
    Caller,
    Close,
    Closing,
    Effect,
    Emit,
    Open,
    Refusal,
    Report,
    RunRefused,
    RunTable,
    Start,
    Stop,
)

A1, A2, A3 = Attempt(0, 1), Attempt(0, 2), Attempt(5, 0)
HOLDER = Caller(0, "s", "j", named=True)
END = Finished(FinishReason.LENGTH, 2, 3)


def task(name: str = "r") -> Task:
    request = Request(
        request_id=name,
        pool=0,
        model="m",
        prompt_ids=(1, 2),
        sampling=SamplingParams(max_tokens=3),
        accepted_ms=0,
        deadline_ms=1,
        reply_to="g",
    )
    return Task(request=request, task_type="t")


def tokens(*ids: int, start: int = 0) -> tuple[Token, ...]:
    return tuple(Token(start + i, token_id) for i, token_id in enumerate(ids))


@pytest.fixture
def table() -> RunTable:
    table = RunTable(grace_ms=100, max_runs=2)
    table.meet(HOLDER, 0)
    table.renew(0, until=1_000, now=0)
    return table


def start(table: RunTable, attempt: Attempt = A1, had: tuple[Token, ...] = ()) -> Start:
    table.meet(replace(HOLDER, epoch=attempt.epoch), 0)
    asked, begun = table.call(attempt.epoch, attempt, task())
    assert asked == Open("r", attempt, "g")
    effects = table.opened("r", attempt, had, 0)
    if had:
        stopped, begun = effects
        assert isinstance(stopped, Stop)
    assert isinstance(begun, Start)
    return begun


def inference(name: str, nbytes: int) -> Task:
    inputs = (InferenceInput(kind=InputKind.IMAGE, data=bytes(nbytes)),)
    return Task(
        request=Inference(request_id=name, pool=0, model="m", inputs=inputs, accepted_ms=0, deadline_ms=1),
        task_type="t",
    )


def test_inputs_have_a_bound_in_bytes_and_one_that_is_alone_is_taken() -> None:
    """A finished run counts until it is released. What has no inputs is taken all the same."""
    table = RunTable(grace_ms=100, max_runs=9, max_bytes=100)
    table.meet(HOLDER, 0)
    table.renew(0, until=1_000, now=0)
    table.call(0, A1, inference("large", 150))
    with pytest.raises(RunRefused, match="inputs of 150 bytes are here; this one has 1 more") as refused:
        table.call(0, A1, inference("small", 1))
    assert refused.value.refusal is Refusal.FULL
    table.call(0, A1, task("text"))
    table.call(0, A2, inference("large", 150))  # it is here, and attaches
    table.no_stream("large", A2)
    table.ended(table.runs["large"].number, END, 0)
    assert table.input_bytes == 150
    table.cancel("large", A2)
    for name, nbytes in (("a", 60), ("b", 40)):
        table.call(0, A1, inference(name, nbytes))
    with pytest.raises(RunRefused):
        table.call(0, A1, inference("c", 1))
    table.audit()
    table.give_back()
    assert table.input_bytes == 0


def of(effects: list[Effect], kind: type) -> list[Effect]:
    return [effect for effect in effects if isinstance(effect, kind)]


def test_it_generates_while_it_asks_and_nobody_is_told_before_the_answer(table: RunTable) -> None:
    assert table.call(0, A1, task()) == [Open("r", A1, "g"), Start(0, task(), ())]
    assert table.token(0, Token(0, 10), 0) is None
    assert table.ended(0, END, 0) == []
    assert table.renew(0, 2_000, 0) == []
    table.audit()
    assert table.generated == 0
    assert table.opened("r", A1, (), 0) == [Emit("r", A1, tokens(10)), Report(0, "r", A1, END, tokens(10))]
    assert table.generated == 1


@pytest.mark.parametrize("had", [(10,), (10, 11)])
def test_what_has_been_generated_meanwhile_goes_on_where_it_fits_the_answer(
    table: RunTable, had: tuple[int, ...]
) -> None:
    table.call(0, A1, task())
    table.token(0, Token(0, 10), 0)
    table.token(0, Token(1, 11), 0)
    assert of(table.opened("r", A1, tokens(*had), 0), Start) == []
    assert table.token(0, Token(2, 12), 0) == Emit("r", A1, tokens(*(10, 11, 12)[len(had) :], start=len(had))[-1:])


@pytest.mark.parametrize("had", [(99,), (10, 99), (10, 11, 12)])
@pytest.mark.parametrize("ended", [False, True])
def test_what_has_been_generated_meanwhile_was_for_nothing_where_it_does_not_fit(
    table: RunTable, had: tuple[int, ...], ended: bool
) -> None:
    """One that is behind its client begins anew too."""
    table.call(0, A1, task())
    for place in range(2):
        table.token(0, Token(place, 10 + place), 0)
    if ended:
        table.ended(0, END, 0)
    effects = table.opened("r", A1, tokens(*had), 0)
    assert effects == [Stop(0, for_nothing=True), Start(1, task(), tokens(*had))]
    table.audit()
    assert table.ended(0, END, 0) == []
    assert table.token(0, Token(2, 12), 0) is None
    assert table.generated == 0
    assert table.ended(1, END, 0) == [Report(1, "r", A1, END, tokens(*had))]


def test_one_that_nobody_wants_was_for_nothing(table: RunTable) -> None:
    table.call(0, A1, task())
    table.token(0, Token(0, 10), 0)
    assert table.unwanted("r", A1) == [Stop(0, for_nothing=True), Close("r", A1, Closing.UNWANTED)]
    assert table.generated == 0
    table.call(0, A2, task())
    table.ended(1, END, 0)
    assert table.cancel("r", A2) == [Stop(1, for_nothing=True), Close("r", A2, Closing.RELEASED)]


def test_tokens_are_emitted_as_they_come_and_the_result_is_reported(table: RunTable) -> None:
    begun = start(table)
    assert table.token(begun.number, Token(0, 10), 0) == Emit("r", A1, tokens(10))
    assert table.token(begun.number, Token(1, 11), 0) == Emit("r", A1, tokens(11, start=1))
    assert table.ended(begun.number, END, 0) == [Report(begun.number, "r", A1, END, tokens(10, 11))]
    assert table.cancel("r", A1) == [Close("r", A1, Closing.RELEASED)]
    assert not table.runs


def test_what_the_client_has_had_is_the_prefix(table: RunTable) -> None:
    begun = start(table, had=tokens(10, 11))
    assert begun.prefix == tokens(10, 11)
    assert table.token(begun.number, Token(2, 12), 0) == Emit("r", A1, tokens(12, start=2))


def test_a_second_call_attaches_and_asks_the_gateway_anew(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    assert table.call(0, A2, task()) == [Close("r", A1, Closing.SUPERSEDED), Open("r", A2, "g")]
    assert table.token(begun.number, Token(1, 11), 0) is None, "nothing goes out before the answer"
    assert table.opened("r", A2, tokens(10), 0) == [Emit("r", A2, tokens(11, start=1))]
    assert table.opened("r", A1, (), 0) == [], "an answer to the former attempt is of the past"


def test_a_run_that_does_not_start_with_what_the_client_has_begins_anew_from_it(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    table.meet(replace(HOLDER, epoch=5), 0)
    table.call(5, A3, task())
    stopped, again = table.opened("r", A3, tokens(99), 0)
    assert stopped == Stop(begun.number, for_nothing=True)
    assert isinstance(again, Start)
    assert again.prefix == tokens(99)
    assert table.token(begun.number, Token(1, 11), 0) is None, "the former generation is not listened to"


def test_a_client_that_is_ahead_makes_the_run_begin_anew(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    table.call(0, A2, task())
    assert of(table.opened("r", A2, tokens(10, 11), 0), Start)


def test_a_finished_run_is_attached_to_and_reports_again(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    table.ended(begun.number, END, 0)
    assert of(table.call(0, A2, task()), Report) == [], "not before the gateway has answered"
    assert table.opened("r", A2, (), 0) == [
        Emit("r", A2, tokens(10)),
        Report(begun.number, "r", A2, END, tokens(10)),
    ]


def test_lower_attempts_and_epochs_are_refused(table: RunTable) -> None:
    start(table, A3)
    with pytest.raises(RunRefused) as refused:
        table.call(5, A1, task())
    assert refused.value.refusal is Refusal.STALE
    for call in (lambda: table.call(0, A1, task("s")), lambda: table.list_runs(0), lambda: table.renew(0, 9, 0)):
        with pytest.raises(RunRefused):
            call()
    assert list(table.runs) == ["r"]


@pytest.mark.parametrize("name", ["", "stranger"])
def test_a_higher_epoch_is_taken_only_from_the_scheduler_that_members_names(table: RunTable, name: str) -> None:
    with pytest.raises(RunRefused, match="no scheduler"):
        table.meet(Caller(2**62, name, "j"), 0)
    assert table.epoch == 0
    assert table.meet(HOLDER, 0) == []
    table.meet(Caller(7, "next", "j", named=True), 0)
    assert table.epoch == 7
    with pytest.raises(RunRefused, match="is over"):
        table.meet(HOLDER, 0)


def test_the_holder_of_the_epoch_may_raise_it_though_members_is_silent(table: RunTable) -> None:
    table.meet(replace(HOLDER, epoch=9, named=False), 0)
    assert table.epoch == 9


def test_another_journal_is_refused_under_a_lease_and_begun_with_without_one(table: RunTable) -> None:
    """Its epochs begin at 0 again, and do not compare with those before."""
    table.meet(replace(HOLDER, epoch=5), 0)
    begun = start(table, A3)
    anew = Caller(2, "new", "another", named=True)
    with pytest.raises(RunRefused, match="lease under the journal j"):
        table.meet(anew, 999)
    with pytest.raises(RunRefused, match="no scheduler"):
        table.meet(replace(anew, named=False), 1_000)
    assert list(table.runs) == ["r"]
    assert table.meet(anew, 1_000) == [Stop(begun.number), Close("r", A3, Closing.FORGOTTEN)]
    assert (table.epoch, table.journal, table.runs) == (2, "another", {})
    assert table.call(2, Attempt(2, 0), task())[0] == Open("r", Attempt(2, 0), "g")
    table.renew(2, 2_000, 1_001)
    with pytest.raises(RunRefused, match="lease under the journal another"):
        table.meet(replace(HOLDER, epoch=6), 1_002)


def test_a_scheduler_that_names_no_journal_is_taken_as_before(table: RunTable) -> None:
    """One of an older release."""
    table.meet(Caller(3, "old", "", named=True), 0)
    assert (table.epoch, table.journal) == (3, "j")


def test_a_cancel_for_a_lower_attempt_is_ignored(table: RunTable) -> None:
    start(table, A2)
    assert table.cancel("r", A1) == []
    assert of(table.cancel("r", A2), Stop)
    assert table.cancel("r", A2) == []


def test_without_a_gateway_it_goes_on_without_a_stream(table: RunTable) -> None:
    _, begun = table.call(0, A1, task())
    assert isinstance(begun, Start)
    assert table.no_stream("r", A1) == []
    assert table.token(begun.number, Token(0, 10), 0) is None
    assert of(table.ended(begun.number, END, 0), Report)


def test_a_run_without_a_client_goes_on_to_its_end_without_a_stream(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    assert table.no_stream("r", A1) == []
    assert table.token(begun.number, Token(1, 11), 0) is None
    assert table.stream_broken("r", A1) == []
    assert table.ended(begun.number, END, 0) == [Report(begun.number, "r", A1, END, tokens(10, 11))]


def test_without_a_lease_nothing_is_emitted_and_with_one_again_all(table: RunTable) -> None:
    begun = start(table)
    assert table.token(begun.number, Token(0, 10), 1_000) is None
    assert table.token(begun.number, Token(1, 11), 1_001) is None
    assert table.renew(0, 2_000, 1_002) == [Emit("r", A1, tokens(10, 11))]
    assert not table.holds_lease(2_000)


def test_a_run_outlives_its_call_by_the_grace_period(table: RunTable) -> None:
    begun = start(table)
    table.hung_up("r", A1, 50)
    assert table.tick(149) == []
    assert table.tick(150) == [Stop(begun.number), Close("r", A1, Closing.FORGOTTEN)]


def test_attaching_ends_the_grace_period(table: RunTable) -> None:
    start(table)
    table.hung_up("r", A1, 50)
    table.call(0, A2, task())
    table.hung_up("r", A1, 60)
    assert table.tick(500) == []


def test_a_broken_stream_is_opened_anew_and_nothing_is_lost(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    assert table.stream_broken("r", A1) == [Open("r", A1, "g")]
    assert table.opened("r", A1, (), 0) == [Emit("r", A1, tokens(10))]


def test_a_run_that_its_gateway_does_not_want_is_dropped(table: RunTable) -> None:
    begun = start(table)
    assert table.unwanted("r", A2) == []
    assert table.unwanted("r", A1) == [Stop(begun.number), Close("r", A1, Closing.UNWANTED)]


def test_a_worker_that_is_full_or_stops_takes_nothing_new_and_gives_back(table: RunTable) -> None:
    start(table)
    table.call(0, A2, task("s"))
    with pytest.raises(RunRefused) as refused:
        table.call(0, A2, task("t"))
    assert refused.value.refusal is Refusal.FULL
    closes = of(table.give_back(), Close)
    assert [close.why for close in closes if isinstance(close, Close)] == [Closing.GIVEN_BACK] * 2
    with pytest.raises(RunRefused) as refused:
        table.call(0, A2, task("t"))
    assert refused.value.refusal is Refusal.DRAINING


def test_the_same_call_twice_is_one_run(table: RunTable) -> None:
    start(table)
    assert table.call(0, A1, task()) == []
    assert table.list_runs(0) == [("r", A1, False)]
    table.audit()


def test_a_result_that_is_never_released_is_kept_for_the_grace_period(table: RunTable) -> None:
    begun = start(table)
    table.token(begun.number, Token(0, 10), 0)
    assert of(table.ended(begun.number, END, 0), Report)
    assert table.tick(50) == []
    assert table.list_runs(0) == [("r", A1, True)]
    assert table.tick(150) == [Close("r", A1, Closing.FORGOTTEN)]
