"""Which records of the journal count, for every reader and wherever it begins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from greenroom.core.generation import FinishReason
from greenroom.core.journal import JournalFold, Verdict
from greenroom.core.messages import Claim, JournalRecord, Lost, Outcome


def claim(scheduler: str, read_to: int) -> Claim:
    return Claim(scheduler=scheduler, read_to=read_to)


def outcome(epoch: int, request_id: str = "r") -> Outcome:
    return Outcome(epoch=epoch, request_id=request_id, reason=FinishReason.STOP)


def verdicts(records: list[JournalRecord], start: int = 0) -> list[Verdict]:
    fold = JournalFold(start)
    return [fold.read(offset, record) for offset, record in enumerate(records) if offset >= start]


def test_a_claim_stands_if_none_came_between_what_it_had_read_and_itself() -> None:
    assert verdicts([claim("a", 0), claim("b", 1)]) == [Verdict.COUNTS, Verdict.COUNTS]
    assert verdicts([claim("a", 0), claim("b", 0)]) == [Verdict.COUNTS, Verdict.VOID]


def test_a_void_claim_blocks_no_later_one() -> None:
    assert verdicts([claim("a", 0), claim("b", 0), claim("c", 1)])[2] is Verdict.COUNTS


def test_outcomes_count_under_the_last_claim_that_stands() -> None:
    records: list[JournalRecord] = [claim("a", 0), outcome(0), claim("b", 2), outcome(0), outcome(2)]
    assert verdicts(records) == [Verdict.COUNTS, Verdict.COUNTS, Verdict.COUNTS, Verdict.VOID, Verdict.COUNTS]


def test_losses_count_as_outcomes_do() -> None:
    lost = Lost(epoch=0, worker="w", attempts=())
    assert verdicts([claim("a", 0), lost, claim("b", 1), lost]) == [
        Verdict.COUNTS,
        Verdict.COUNTS,
        Verdict.COUNTS,
        Verdict.VOID,
    ]


def test_a_claim_that_had_read_what_is_not_written_yet_is_void() -> None:
    assert verdicts([claim("a", 5)]) == [Verdict.VOID]


def test_nothing_counts_before_a_claim() -> None:
    assert verdicts([outcome(0)]) == [Verdict.UNDECIDED]


def test_a_record_is_read_once_and_in_order() -> None:
    fold = JournalFold()
    fold.read(3, claim("a", 0))
    with pytest.raises(ValueError, match="3"):
        fold.read(3, claim("a", 0))
    fold.skip(7)
    assert fold.next_offset == 8


def test_a_late_reader_leaves_undecided_what_it_can_not_judge() -> None:
    # a's claim at 0 is unknown to a reader from 1 on; b's had not read it, and is void for a reader that knows.
    records: list[JournalRecord] = [
        claim("a", 0),
        claim("b", 0),
        outcome(1),
        claim("c", 1),
        outcome(3),
        claim("d", 4),
        outcome(5),
    ]
    assert verdicts(records, start=1) == [
        Verdict.UNDECIDED,
        Verdict.UNDECIDED,
        Verdict.UNDECIDED,
        Verdict.UNDECIDED,
        Verdict.COUNTS,
        Verdict.COUNTS,
    ]


@st.composite
def journals(draw: st.DrawFn) -> list[JournalRecord]:
    records: list[JournalRecord] = []
    for offset in range(draw(st.integers(1, 24))):
        if draw(st.booleans()):
            records.append(claim(draw(st.sampled_from("abc")), draw(st.integers(0, offset))))
        else:
            records.append(outcome(draw(st.integers(0, max(0, offset - 1)))))
    return records


@given(journals(), st.integers(0, 24))
def test_a_late_reader_never_disagrees_with_one_that_read_all(records: list[JournalRecord], start: int) -> None:
    everything = verdicts(records)
    late = verdicts(records, start)
    for whole, part in zip(everything[start:], late, strict=False):
        assert part in (whole, Verdict.UNDECIDED) or {whole, part} == {Verdict.VOID, Verdict.UNDECIDED}


@given(journals())
def test_between_two_epochs_only_records_of_the_first_count(records: list[JournalRecord]) -> None:
    epoch = None
    for offset, (record, verdict) in enumerate(zip(records, verdicts(records), strict=True)):
        if isinstance(record, Claim) and verdict is Verdict.COUNTS:
            epoch = offset
        elif isinstance(record, Outcome):
            assert (verdict is Verdict.COUNTS) == (epoch is not None and record.epoch == epoch)
