"""Which token follows: exactly, in distribution, and again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from greenroom.core.errors import InvalidRequest
from greenroom.core.generation import GenerationRequest, SamplingParams, Token
from greenroom.moe.batch.logit_changes import (
    Draw,
    InvalidLogits,
    TokenCounts,
    UnusableChanges,
    changed_logits,
    token_counts,
)
from greenroom.moe.batch.sampling import SampledToken, sample, sampling_key, uniform
from greenroom.moe.batch.sequence import Sequence

LOGITS = torch.tensor([2.0, 0.0, 1.0, -1.0, 1.5, -3.0, 0.5, -0.5])


def pick(logits: torch.Tensor, position: int = 3, key: int = 11, **params: Any) -> SampledToken:
    (picked,) = sample(logits[None], [Draw(SamplingParams(**params), key, position)])
    assert isinstance(picked, SampledToken)
    return picked


def frequencies(logits: torch.Tensor, draws: int, **params: Any) -> np.ndarray[Any, Any]:
    sampling = SamplingParams(**params)
    picked = sample(logits.expand(draws, -1), [Draw(sampling, 11, position) for position in range(draws)])
    tokens = [p.token_id for p in picked if isinstance(p, SampledToken)]
    return np.bincount(tokens, minlength=len(logits)) / draws


def allowed_by_transformers(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    scores = TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())


def test_the_generator_is_philox_4x64_10() -> None:
    """The known answer for a zero counter and a zero key, of the authors' own Random123 distribution."""
    words = np.random.Philox(key=0, counter=2**256 - 1).random_raw(4)  # numpy counts up before it draws
    assert [hex(word) for word in words] == [
        "0x16554d9eca36314c",
        "0xdb20fe9d672d0fdc",
        "0xd7e772cee186176b",
        "0x7e68b68aec7ba23b",
    ]


def test_numbers_do_not_change_between_versions() -> None:
    """Recorded: a request that names a seed gets the same text from a later version too."""
    key = sampling_key(7, "any")
    assert key == sampling_key(7, "other")
    recorded = [0.1820170520013774, 0.5526392641361775, 0.6236751777571999]
    assert [uniform(key, position) for position in (0, 1, 1000)] == recorded


@given(st.integers(0, 2**128 - 1), st.integers(0, 10**6))
def test_numbers_are_in_the_unit_interval_and_repeat(key: int, position: int) -> None:
    number = uniform(key, position)
    assert 0 <= number < 1
    assert number == uniform(key, position)


def test_numbers_are_uniform_over_positions_and_over_keys() -> None:
    by_position = np.array([uniform(5, position) for position in range(4000)])
    by_key = np.array([uniform(sampling_key(seed, ""), 9) for seed in range(4000)])
    for numbers in (by_position, by_key):
        ranks = np.sort(numbers)
        distance = np.abs(ranks - (np.arange(4000) + 0.5) / 4000).max()
        assert distance < 1.63 / np.sqrt(4000)  # Kolmogorov-Smirnov, 1 %; the numbers are fixed, so it holds or not
    assert abs(np.corrcoef(by_position[:-1], by_position[1:])[0, 1]) < 0.05


def test_without_a_seed_the_request_decides() -> None:
    assert sampling_key(None, "a") == sampling_key(None, "a")
    assert len({sampling_key(None, "a"), sampling_key(None, "b"), sampling_key(1, "a"), sampling_key(-1, "a")}) == 4


def test_greedy_takes_the_lowest_of_equals() -> None:
    tied = torch.zeros(300)
    tied[[250, 40, 41]] = 2.0
    for dtype in (torch.float32, torch.bfloat16):
        assert pick(tied.to(dtype), temperature=0).token_id == 40


def test_draws_follow_the_distribution() -> None:
    wanted = torch.softmax(LOGITS.double() / 0.8, -1).numpy()
    got = frequencies(LOGITS, 6000, temperature=0.8)
    chi_square = float((6000 * (got - wanted) ** 2 / wanted).sum())
    assert chi_square < 18.5  # 7 degrees of freedom, 1 %


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (0, 0.7), (4, 0.6), (0, 0.05), (1, 1.0), (8, 0.99), (99, 1.0)])
def test_left_out_tokens_are_those_that_transformers_leaves_out(top_k: int, top_p: float) -> None:
    got = frequencies(LOGITS, 3000, temperature=0.9, top_k=top_k, top_p=top_p)
    allowed = allowed_by_transformers(LOGITS, 0.9, top_k, top_p)
    assert set(np.flatnonzero(got).tolist()) == allowed
    kept = torch.full_like(LOGITS, -torch.inf)
    kept[sorted(allowed)] = LOGITS[sorted(allowed)]
    wanted = torch.softmax(kept.double() / 0.9, -1).numpy()
    assert np.abs(got - wanted).max() < 0.03


def test_a_nucleus_wider_than_the_first_try_is_found_too() -> None:
    flat = torch.linspace(0, 1, 5000)
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    drawn = {
        p.token_id
        for p in sample(flat.expand(3000, -1), [Draw(sampling, 3, i) for i in range(3000)])
        if isinstance(p, SampledToken)
    }
    allowed = allowed_by_transformers(flat.double(), 1.0, 0, 0.9)
    assert drawn <= allowed
    assert len(allowed) > 4000
    assert min(drawn) < min(allowed) + 20


@given(st.integers(0, 2**64), st.integers(0, 1000), st.floats(1e-300, 2.0), st.integers(0, 10), st.floats(1e-9, 1.0))
def test_any_parameters_draw_an_allowed_token(key: int, position: int, heat: float, top_k: int, top_p: float) -> None:
    picked = pick(LOGITS, position, key, temperature=heat, top_k=top_k, top_p=top_p)
    assert 0 <= picked.token_id < len(LOGITS)
    if top_k == 1 or heat < 1e-3:
        assert picked.token_id == 0


def test_a_token_of_no_probability_is_never_drawn() -> None:
    some = torch.full((50,), -torch.inf)
    some[[7, 31]] = 0.0
    assert set(np.flatnonzero(frequencies(some, 500, temperature=1.0)).tolist()) == {7, 31}


def test_tokens_that_trade_places_in_the_last_bit_do_not_trade_their_numbers() -> None:
    close = torch.zeros(100)
    other = close.clone()
    other[::2] += 1e-7
    for position in range(200):
        assert pick(close, position, temperature=1.0).token_id == pick(other, position, temperature=1.0).token_id


def test_logprobs_are_those_before_temperature_and_cuts() -> None:
    picked = pick(LOGITS, temperature=0.3, top_k=1, logprobs=3)
    wanted = torch.log_softmax(LOGITS, -1)
    assert picked.logprobs is not None
    assert picked.logprobs.chosen == pytest.approx(float(wanted[0]))
    assert [token for token, _ in picked.logprobs.top] == [0, 4, 2]
    assert [value for _, value in picked.logprobs.top] == pytest.approx([float(wanted[i]) for i in (0, 4, 2)])


def test_logprobs_of_the_chosen_alone_and_of_more_than_there_are() -> None:
    assert pick(LOGITS, temperature=0).logprobs is None
    alone = pick(LOGITS, temperature=0, logprobs=0).logprobs
    assert alone is not None
    assert alone.top == ()
    everything = pick(LOGITS, temperature=0, logprobs=20).logprobs
    assert everything is not None
    assert len(everything.top) == len(LOGITS)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_without_usable_logits_fails_alone(bad: float) -> None:
    rows = LOGITS.repeat(3, 1)
    rows[1, 5] = bad
    draws = [Draw(SamplingParams(temperature=t), 1, 4) for t in (0, 0.5, 0.5)]
    first, second, third = sample(rows, draws)
    assert isinstance(first, SampledToken)
    assert isinstance(second, InvalidLogits)
    assert isinstance(third, SampledToken)
    assert third == pick(LOGITS, 4, 1, temperature=0.5)


def test_rows_are_drawn_alike_alone_and_together() -> None:
    rows = torch.randn(6, 400, generator=torch.Generator().manual_seed(1))
    draws = [Draw(SamplingParams(temperature=0.2 * i, top_p=0.9, top_k=20 * i), i, 50 - i) for i in range(6)]
    together = sample(rows, draws)
    assert together == [sample(rows[i : i + 1], [draws[i]])[0] for i in range(6)]


# -- changes of logits, beside transformers' own processors --------------------------------------------------------

VOCABULARY = 24
IDS = st.integers(0, VOCABULARY - 1)
ROWS = st.integers(0, 2**32).map(
    lambda seed: torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
)
TEXTS = st.tuples(st.lists(IDS, min_size=1, max_size=12), st.lists(IDS, max_size=12))


def sequence_of(prompt: list[int], generated: list[int], **params: Any) -> Sequence:
    prefix = tuple(Token(place, token_id) for place, token_id in enumerate(generated))
    request = GenerationRequest("r", tuple(prompt), SamplingParams(**params), prefix=prefix)
    return Sequence(0, request, lambda _: None, limit=1000, eos_token_ids=frozenset({2}), checker=None, now=0.0)


@given(ROWS, TEXTS, st.floats(0.1, 5.0))
def test_repetition_penalty_is_that_of_transformers_to_the_bit(
    row: torch.Tensor, text: tuple[list[int], list[int]], penalty: float
) -> None:
    prompt, generated = text
    draw = sequence_of(prompt, generated, repetition_penalty=penalty).next_draw()
    wanted = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + generated]), row[None].clone())
    assert torch.equal(changed_logits(row[None], [draw]), wanted)


@given(ROWS, TEXTS, st.dictionaries(IDS, st.floats(-100, 100), max_size=5), st.integers(0, 14), st.floats(0.5, 2.0))
def test_all_changes_are_those_of_transformers_in_its_order(
    row: torch.Tensor, text: tuple[list[int], list[int]], bias: dict[int, float], least: int, penalty: float
) -> None:
    """transformers adds a bias, then penalises, then keeps ends back."""
    prompt, generated = text
    params: dict[str, Any] = {"logit_bias": tuple(bias.items()), "min_tokens": least, "repetition_penalty": penalty}
    draw = sequence_of(prompt, generated, stop_token_ids=(5,), **params).next_draw()
    theirs = LogitsProcessorList()
    if bias:
        theirs.append(SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]))
    theirs.append(RepetitionPenaltyLogitsProcessor(penalty))
    theirs.append(MinNewTokensLengthLogitsProcessor(len(prompt), least, [2, 5]))
    wanted = theirs(torch.tensor([prompt + generated]), row[None].clone())
    assert torch.equal(changed_logits(row[None], [draw]), wanted)


@given(ROWS, TEXTS, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_follow_openais_formula(
    row: torch.Tensor, text: tuple[list[int], list[int]], presence: float, frequency: float
) -> None:
    """mu[j] -= c[j] * frequency + (c[j] > 0) * presence, where c counts generated tokens alone."""
    prompt, generated = text
    draw = sequence_of(prompt, generated, presence_penalty=presence, frequency_penalty=frequency).next_draw()
    times = np.bincount(generated, minlength=VOCABULARY) if generated else np.zeros(VOCABULARY)
    wanted = row.double().numpy() - times * frequency - (times > 0) * presence
    assert changed_logits(row[None], [draw])[0].numpy() == pytest.approx(wanted, abs=1e-5)


@given(ROWS, st.floats(0.2, 2.0), st.integers(0, 24), st.floats(0.05, 1.0), st.floats(0.0, 1.0), st.integers(0, 2**32))
def test_min_p_leaves_what_transformers_leaves(
    row: torch.Tensor, heat: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Behind top-k and top-p, as there. Both are rounded differently, so the edge itself may fall either way."""
    scores = TemperatureLogitsWarper(heat)(None, row[None].double())
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    allowed = torch.isfinite(MinPLogitsWarper(min_p)(None, scores)[0])
    drawn = pick(row, 3, seed, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p).token_id
    share = float(((row.double()[drawn] - row.double().max()) / heat).exp())
    assert allowed[drawn] or share == pytest.approx(min_p, rel=1e-9) or top_p < 1
    if min_p > 0:
        assert share >= min_p * (1 - 1e-9)


@pytest.mark.parametrize("min_p", [0.02, 0.1, 0.4, 1.0])
def test_min_p_draws_every_token_that_transformers_leaves(min_p: float) -> None:
    got = frequencies(LOGITS, 4000, temperature=1.3, min_p=min_p)
    scores = MinPLogitsWarper(min_p)(None, TemperatureLogitsWarper(1.3)(None, LOGITS[None].double()))[0]
    wanted = scores.softmax(-1).numpy()
    assert set(np.flatnonzero(got)) == set(np.flatnonzero(wanted))
    assert np.abs(got - wanted).max() < 0.03


def test_a_nucleus_of_nothing_holds_the_likeliest_token() -> None:
    tied = LOGITS.clone()
    tied[[3, 6]] = 5.0
    assert {pick(tied, place, temperature=2.0, top_p=0.0).token_id for place in range(50)} == {3}


def test_greedy_rows_take_the_largest_of_the_changed_logits_and_logprobs_stay_the_models() -> None:
    (picked,) = sample(LOGITS[None], [Draw(SamplingParams(temperature=0, logit_bias=((5, 50.0),), logprobs=1), 1, 1)])
    assert isinstance(picked, SampledToken)
    assert picked.token_id == 5
    assert picked.logprobs is not None
    assert picked.logprobs.chosen == pytest.approx(float(LOGITS.log_softmax(-1)[5]))
    assert picked.logprobs.top[0][0] == 0


def test_a_row_whose_changes_leave_nothing_fails_alone() -> None:
    draws = [
        Draw(SamplingParams(temperature=0), 1, 1, banned=tuple(range(8))),
        Draw(SamplingParams(temperature=0), 1, 1),
    ]
    bad, good = sample(LOGITS.repeat(2, 1), draws)
    assert isinstance(bad, UnusableChanges)
    assert "min_tokens" in str(bad)
    assert good == SampledToken(0)


@given(TEXTS, st.integers(0, 12))
def test_a_forced_prefix_counts_as_what_was_generated(text: tuple[list[int], list[int]], cut: int) -> None:
    """The request goes on at another worker: the next draw there is the one that it would have had here."""
    prompt, generated = text
    knobs: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "min_tokens": 6,
    }
    here = sequence_of(prompt, generated[:cut], **knobs)
    for token_id in generated[cut:]:
        here.accept(SampledToken(token_id))
    ours, theirs = here.next_draw(), sequence_of(prompt, generated, **knobs).next_draw()
    row = LOGITS.repeat(3)[None]
    assert torch.equal(changed_logits(row, [ours]), changed_logits(row, [theirs]))
    assert (ours.position, ours.banned) == (theirs.position, theirs.banned)


def test_who_asks_for_no_penalty_pays_for_none() -> None:
    plain = sequence_of([1, 2], [3], temperature=0.5, top_p=0.9, min_p=0.1)
    assert not plain.next_draw().changes_logits
    assert token_counts(SamplingParams(presence_penalty=1), (1, 2), ()).ids.size == 0  # type: ignore[union-attr]
    assert sequence_of([1, 1, 2], [1], repetition_penalty=2).next_draw().counts.ids.tolist() == [1, 2]  # type: ignore[union-attr]


def test_counts_grow_with_the_text() -> None:
    counts = TokenCounts([7])
    for token in range(100):
        counts.add(token)
        counts.add(7)
    assert counts.ids.tolist() == [7, *(token for token in range(100) if token != 7)]
    assert counts.times[0] == 101
    assert set(counts.times[1:]) == {1.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")), ("frequency_penalty", -2.1), ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")), ("min_tokens", -1), ("max_tokens", -1), ("logit_bias", ((1, 100.5),)),
        ("logit_bias", ((-1, 1.0),)), ("logit_bias", ((1, 1.0), (1, 2.0))),
    ],
)  # fmt: skip
def test_values_out_of_their_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
