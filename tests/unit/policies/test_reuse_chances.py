from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.events import Artifact, LayerRouting, Step
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.reuse.chances import KEEP_OVER_ALL, NEVER, REUSE, Coefficients, ReuseChances
from tests.examples import examples
from tests.unit.policies.bench import keys_of

POOL = Catalogue("pool", experts_per_layer=[4, 3], top_k=[2, 1], expert_bytes=[1, 1])
KEEP = (0.5, 0.9)
PAIRS = 2 * (4 * 4 + 3 * 3)


def arrays_of(seed: int = 0, *, followers: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "keep": np.array(KEEP, dtype=np.float32),
        "weights": rng.normal(size=(2, 3)).astype(np.float32),
        "bias": rng.normal(size=7).astype(np.float32),
        "followers": rng.normal(size=PAIRS if followers else 0).astype(np.float32),
    }


def coefficients_of(arrays: Mapping[str, np.ndarray]) -> Coefficients:
    return Coefficients.of_artifact(POOL, Artifact(REUSE, "1", arrays))


def routed(layer: int, rows: list[tuple[int, tuple[int, ...]]]) -> LayerRouting:
    """Rows of these sequences, each with its picks, in their order."""
    step = Step("pool", 0, keys_of(sequence for sequence, _ in rows), np.ones(len(rows), dtype=np.uint8))
    return LayerRouting.from_picks(POOL, step, layer, np.array([picks for _, picks in rows]))


class Plain:
    """The same, token by token, as the docstrings have it."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.of = arrays
        self.over_all = np.array([0.5] * 4 + [1 / 3] * 3)
        self.averages: dict[int, np.ndarray] = {}
        self.last: dict[tuple[int, int], list[np.ndarray]] = {}
        self.chances: dict[int, np.ndarray] = {}

    def add(self, layer: int, rows: list[tuple[int, tuple[int, ...]]]) -> None:
        span = POOL.spans[layer]
        width = span.stop - span.start
        for sequence, _ in rows:
            if sequence not in self.averages:
                self.averages[sequence] = np.tile(self.over_all, (len(KEEP), 1))
                self.chances[sequence] = np.zeros(POOL.size)
        tokens = [(sequence, np.isin(np.arange(width), picks).astype(float)) for sequence, picks in rows]
        kept = KEEP_OVER_ALL ** len(rows)
        mean = sum(token for _, token in tokens) / len(rows)
        self.over_all[span] = kept * self.over_all[span] + (1 - kept) * mean
        for sequence, token in tokens:
            for place, keep in enumerate(KEEP):
                average = self.averages[sequence][place]
                average[span] = keep * average[span] + (1 - keep) * token
            self.last.setdefault((sequence, layer), []).append(token)
        for sequence in {sequence for sequence, _ in rows}:
            self.chances[sequence][span] = self._chance(sequence, layer)

    def _chance(self, sequence: int, layer: int) -> np.ndarray:
        span = POOL.spans[layer]
        width = span.stop - span.start
        features = np.clip([*self.averages[sequence][:, span], self.over_all[span]], NEVER, 1 - NEVER)
        logits = self.of["weights"][layer] @ np.log(features / (1 - features)) + self.of["bias"][span]
        if len(self.of["followers"]):
            first = 2 * 16 * layer
            pairs = self.of["followers"][first : first + 2 * width * width].reshape(2, width, width)
            for back, token in enumerate(self.last[sequence, layer][:-3:-1]):
                logits = logits + token @ pairs[back]
        return np.asarray(1 / (1 + np.exp(-logits)))

    @property
    def soon(self) -> np.ndarray:
        return np.asarray(1 - np.prod([1 - chance for chance in self.chances.values()], axis=0))


picks = st.tuples(
    st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True).map(tuple), st.integers(0, 2).map(lambda e: (e,))
)
steps = st.lists(st.lists(st.tuples(st.integers(0, 5), picks), min_size=1, max_size=6), min_size=1, max_size=8)


@settings(deadline=None, max_examples=examples(60))
@given(steps, st.booleans())
def test_chances_are_those_of_the_formula_for_any_mix_of_prompts_and_single_tokens(
    stream: list[list[tuple[int, tuple[tuple[int, ...], tuple[int, ...]]]]], followers: bool
) -> None:
    arrays = arrays_of(followers=followers)
    chances, plain = ReuseChances(POOL, coefficients_of(arrays)), Plain(arrays)
    for step in stream:
        for layer in range(2):
            rows = [(sequence, both[layer]) for sequence, both in step]
            routing = routed(layer, rows)
            chances.add(routing)
            plain.add(layer, rows)
    assert chances.over_all == pytest.approx(plain.over_all, abs=1e-5)
    assert chances.soon == pytest.approx(plain.soon, abs=2e-4)


def use(chances: ReuseChances, *sequences: int, pick: tuple[int, int] = (0, 1)) -> None:
    routing = routed(0, [(sequence, pick) for sequence in sequences])
    chances.add(routing)


def test_a_sequence_that_was_never_routed_is_expected_to_be_like_all() -> None:
    """Also of more sequences than there was room for, before anything was added, and in some layers only."""
    arrays = arrays_of()
    chances = ReuseChances(POOL, coefficients_of(arrays))

    def like_all() -> np.ndarray:
        known = np.log(chances.over_all / (1 - chances.over_all))
        return np.asarray(arrays["weights"].sum(axis=1)[POOL.layer_of] * known + arrays["bias"])

    assert np.abs(chances.logits(np.arange(9)) - like_all()).max() < 1e-4
    use(chances, 3)
    found = chances.logits(np.array([3, 20]))
    assert np.abs(found[1] - like_all()).max() < 1e-4
    second = POOL.spans[1]
    assert np.abs(found[0, second] - like_all()[second]).max() < 1e-4, "layer 1 has not routed it yet"
    routed_in = np.log(chances.soon[POOL.spans[0]] / (1 - chances.soon[POOL.spans[0]]))
    assert np.abs(found[0, POOL.spans[0]] - routed_in).max() < 1e-3
    chances.end(3)
    assert np.abs(chances.logits(np.array([30]))[0] - like_all()).max() < 1e-4, "in the row that the ended one had"


def test_an_ended_sequence_uses_nothing_any_more_and_leaves_nothing_to_the_next_in_its_row() -> None:
    coefficients = coefficients_of(arrays_of())
    chances, other = ReuseChances(POOL, coefficients), ReuseChances(POOL, coefficients)
    for one in (chances, other):
        use(one, 1, 2)
    chances.end(1)
    alone = ReuseChances(POOL, coefficients)
    alone.over_all[:] = chances.over_all
    use(other, 2, pick=(2, 3))
    use(chances, 2, pick=(2, 3))
    assert (chances.soon[:4] < other.soon[:4]).all()
    assert chances.soon[:4] == pytest.approx(
        1 - (1 - other.soon[:4]) / (1 - one_of(coefficients, (0, 1), tokens=2)), abs=1e-4
    )
    before = chances.over_all.copy()
    use(chances, 7)  # in the place of 1
    fresh = ReuseChances(POOL, coefficients)
    fresh.over_all[:] = before
    use(fresh, 7)
    chances.end(2)
    assert chances.soon[:4] == pytest.approx(fresh.soon[:4], abs=1e-6)


def one_of(coefficients: Coefficients, pick: tuple[int, int], *, tokens: int) -> np.ndarray:
    """The chances of a sequence with one token where ``tokens`` of others count over all."""
    chances = ReuseChances(POOL, coefficients)
    routing = routed(0, [(sequence, pick) for sequence in range(tokens)])
    chances.add(routing)
    for sequence in range(1, tokens):
        chances.end(sequence)
    return chances.soon[:4]


def test_when_the_last_has_left_the_next_is_expected_to_go_on_as_it_did() -> None:
    chances = ReuseChances(POOL, coefficients_of(arrays_of()))
    use(chances, 1)
    soon = chances.soon.copy()
    chances.end(1)
    chances.end(99)
    assert chances.soon.tolist() == soon.tolist()


def test_where_picks_were_not_recorded_the_experts_used_count_as_one_token_of_each() -> None:
    known, unknown = (ReuseChances(POOL, coefficients_of(arrays_of())) for _ in range(2))
    for chances, recorded in ((known, True), (unknown, False)):
        for routing in (routed(0, [(5, (1, 3))]), routed(0, [(5, (0, 3)), (6, (0, 3))])):
            bare = LayerRouting(POOL, routing.step, 0, routing.experts, routing.rows)
            chances.add(routing if recorded else bare)
    assert unknown.soon == pytest.approx(known.soon, abs=1e-5)


def test_untraced_models_have_coefficients_by_which_what_was_used_lately_is_likelier() -> None:
    for pool in (POOL, Catalogue.uniform("wide", layers=3, experts=64, top_k=6)):
        chances = ReuseChances(pool, Coefficients.untraced(pool))
        own = np.arange(int(pool.top_k[0]))
        step = Step("pool", 0, keys_of([1]), np.ones(1, dtype=np.uint8))
        for _ in range(30):
            routing = LayerRouting.from_picks(pool, step, 0, own[None])
            chances.add(routing)
        first = chances.soon[pool.spans[0]]
        assert first[own].min() > 0.5 > first[len(own) :].max()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("weights", np.ones((2, 2))), ("bias", np.ones(6)), ("followers", np.ones(3)), ("keep", None)],
)
def test_coefficients_of_another_model_are_refused(name: str, wrong: np.ndarray | None) -> None:
    arrays = arrays_of()
    if wrong is None:
        del arrays[name]
    else:
        arrays[name] = wrong.astype(np.float32)
    with pytest.raises(InvalidConfig):
        coefficients_of(arrays)
    with pytest.raises(InvalidConfig, match="kind"):
        Coefficients.of_artifact(POOL, Artifact("eamc", "1", arrays_of()))


@pytest.mark.parametrize("same_rates", [True, False])
def test_a_swap_keeps_what_sequences_used_unless_the_rates_change(same_rates: bool) -> None:
    first, second = arrays_of(1), arrays_of(2)
    if not same_rates:
        first["keep"] = np.array([0.3, 0.6], dtype=np.float32)
    swapped, whole = ReuseChances(POOL, coefficients_of(first)), ReuseChances(POOL, coefficients_of(second))
    for chances in (swapped, whole):
        use(chances, 1)
        use(chances, 1, pick=(2, 3))
    swapped.swap(coefficients_of(second))
    for chances in (swapped, whole):
        use(chances, 1, pick=(1, 2))
    alike = np.allclose(swapped.soon[:4], whole.soon[:4], atol=1e-5)
    assert alike == same_rates
