"""The ledger refuses whatever would break its invariants, and changes nothing then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from greenroom.experts.bookkeeping.ledger import Ledger, LedgerError, State
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.slot_sizes import SlotSizes

EXPERTS, SLOTS = 7, 4
ALIKE = SlotSizes.uniform(EXPERTS)
MIXED = SlotSizes(Catalogue("mixed", experts_per_layer=[4, 3], top_k=[1, 1], expert_bytes=[20, 10]))


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of operations, allowed or not: allowed ones do what a plain model does, others change nothing."""

    sizes = ALIKE

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(self.sizes, SLOTS)
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
        number = self.ledger.size_class(e)
        alike = {other for other in self.loading | self.resident if self.ledger.size_class(other) == number}
        room = len(alike) < self.ledger.places[number]
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
        evictable = {e for e in self.resident if not self.pins[e]}
        assert set(np.flatnonzero(self.ledger.evictable())) == evictable
        for number, free in enumerate(self.ledger.free_places.tolist()):
            assert free == self.ledger.free_in(number)
            own = {e for e in evictable if self.ledger.size_class(e) == number}
            assert set(np.flatnonzero(self.ledger.evictable_in(number))) == own
        slot_bytes = self.ledger.slot_bytes
        for e in self.loading | self.resident:
            assert slot_bytes[self.ledger.slot_of[e]] == self.ledger.bytes_of(e)


class MixedLedgerMachine(LedgerMachine):
    sizes = MIXED


test_any_sequence_of_operations = LedgerMachine.TestCase
test_any_sequence_of_operations_on_records_of_two_sizes = MixedLedgerMachine.TestCase


@given(st.data())
def test_the_audit_sees_damage(data: st.DataObject) -> None:
    ledger = Ledger(MIXED, SLOTS)
    held = (0, 1, 4)  # two of one size, one of another
    for expert in held:
        ledger.reserve(expert)
        ledger.arrived(expert)
    ledger.audit()
    place = data.draw(st.integers(0, 2))
    victim, other = held[place], held[place - 1]
    damage = data.draw(st.sampled_from(["slot lost", "slot twice", "classes", "free", "state", "resident", "pin"]))
    match damage:
        case "slot lost":
            ledger.slot_of[victim] = -1
        case "slot twice":
            ledger.slot_of[victim] = ledger.slot_of[other]
        case "classes":
            ledger.slot_of[[0, 4]] = ledger.slot_of[[4, 0]]
        case "free":
            ledger.free += 1
        case "state":
            ledger.state[victim] = State.ABSENT
        case "resident":
            ledger.resident[victim] = False
        case "pin":
            ledger._pins[victim] = -1
    with pytest.raises(LedgerError):
        ledger.audit()
