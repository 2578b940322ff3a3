"""The ledger refuses whatever would break its invariants, and changes nothing then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.experts.bookkeeping.ledger import Ledger, LedgerError, State

EXPERTS, SLOTS = 7, 4


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations, allowed or not: allowed ones do what a plain model does, others change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(EXPERTS, SLOTS)
        self.loading: set[int] = set()
        self.resident: set[int] = set()
        self.pins = [0] * EXPERTS

    def attempt(self, allowed: bool, act: object, *arguments: object) -> bool:
        assert callable(act)
        if allowed:
            act(*arguments)
        else:
            before = (self.ledger.state.copy(), self.ledger.slot_of.copy(), self.ledger.free)
            with pytest.raises(LedgerError):
                act(*arguments)
            np.testing.assert_array_equal(before[0], self.ledger.state)
            np.testing.assert_array_equal(before[1], self.ledger.slot_of)
            assert before[2] == self.ledger.free
        return allowed

    @rule(e=st.integers(0, EXPERTS - 1))
    def reserve(self, e: int) -> None:
        room = len(self.loading | self.resident) < SLOTS
        if self.attempt(room and e not in self.loading | self.resident, self.ledger.reserve, e):
            self.loading.add(e)

    @rule(e=st.integers(0, EXPERTS - 1))
    def arrived(self, e: int) -> None:
        if self.attempt(e in self.loading, self.ledger.arrived, e):
            self.loading.remove(e)
            self.resident.add(e)

    @rule(e=st.integers(0, EXPERTS - 1))
    def abandon(self, e: int) -> None:
        if self.attempt(e in self.loading, self.ledger.abandon, e):
            self.loading.remove(e)

    @rule(e=st.integers(0, EXPERTS - 1))
    def evict(self, e: int) -> None:
        if self.attempt(e in self.resident and not self.pins[e], self.ledger.evict, e):
            self.resident.remove(e)

    @rule(es=st.sets(st.integers(0, EXPERTS - 1), min_size=1))
    def pin(self, es: set[int]) -> None:
        self.ledger.pin(np.array(sorted(es)))
        for e in es:
            self.pins[e] += 1

    @rule(es=st.sets(st.integers(0, EXPERTS - 1), min_size=1))
    def unpin(self, es: set[int]) -> None:
        if self.attempt(all(self.pins[e] for e in es), self.ledger.unpin, np.array(sorted(es))):
            for e in es:
                self.pins[e] -= 1

    @invariant()
    def agrees_with_the_plain_model(self) -> None:
        self.ledger.audit()
        assert set(np.flatnonzero(self.ledger.resident)) == self.resident
        assert set(np.flatnonzero(self.ledger.state == State.LOADING)) == self.loading
        assert self.ledger.free == SLOTS - len(self.loading) - len(self.resident)
        assert self.ledger.loading == len(self.loading)
        assert set(np.flatnonzero(self.ledger.evictable())) == {e for e in self.resident if not self.pins[e]}


test_any_sequence_of_operations = LedgerMachine.TestCase


@given(st.data())
def test_the_audit_sees_damage(data: st.DataObject) -> None:
    ledger = Ledger(EXPERTS, SLOTS)
    for expert in range(3):
        ledger.reserve(expert)
        ledger.arrived(expert)
    victim = data.draw(st.integers(0, 2))
    damage = data.draw(st.sampled_from(["slot lost", "slot twice", "state", "resident", "pin"]))
    match damage:
        case "slot lost":
            ledger.slot_of[victim] = -1
        case "slot twice":
            ledger.slot_of[victim] = ledger.slot_of[(victim + 1) % 3]
        case "state":
            ledger.state[victim] = State.ABSENT
        case "resident":
            ledger.resident[victim] = False
        case "pin":
            ledger._pins[victim] = -1
    with pytest.raises(LedgerError):
        ledger.audit()
