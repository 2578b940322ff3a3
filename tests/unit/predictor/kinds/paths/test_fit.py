from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY, PathsFile
from greenroom.core.artifacts.paths_forms.tables import GRAMS, MODES, feature_names
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.core.errors import InvalidConfig
from greenroom.policies.expertflow.token_tables import TokenTables
from greenroom.predictor.kinds.paths.fit import KEEP, FitOptions, fit
from greenroom.predictor.kinds.reuse.fit import KEEP as REUSE_KEEP
from greenroom.replay.traces.routing_trace import RoutingTrace
from greenroom.replay.traces.trace_file import TraceError

LAYERS, EXPERTS, TOKENS, K = 2, 8, 10, 2


def spoken(sequences: int, tokens: int, *, seed: int = 0, by: str = "token", noise: float = 0.0) -> RoutingTrace:
    """A row's picks follow from its token, from it and the one before, or from its token and its sequence."""
    rng = np.random.default_rng(seed)
    token = rng.integers(TOKENS, size=(sequences, tokens))
    meaning = {"token": token, "pair": token + TOKENS * np.roll(token, 1, axis=1)}.get(by)
    if meaning is None:
        meaning = token + TOKENS * (np.arange(sequences)[:, None] + 1000 * seed)
    kinds, which = np.unique(meaning, return_inverse=True)
    table = np.stack([
        [np.random.default_rng(int(kind)).permutation(EXPERTS)[:K] for _ in range(1)] * LAYERS for kind in kinds
    ])  # fmt: skip
    picks = table[which.ravel()]
    drawn = rng.random(len(picks)) < noise
    picks[drawn] = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(int(drawn.sum()))])[:, None] if noise else 0
    return RoutingTrace(
        picks.astype(np.uint8), np.arange(sequences + 1) * tokens, EXPERTS, token=token.ravel(), model="spoken"
    )


def knows_nothing(experts: tuple[int, ...] = (EXPERTS,) * LAYERS) -> ReuseFile:
    return ReuseFile(
        model="", experts_per_layer=experts, sequences=1, keep=np.array(REUSE_KEEP, dtype=np.float32),
        weights=np.zeros((len(experts), len(REUSE_KEEP) + 1), dtype=np.float32),
        bias=np.zeros(sum(experts), dtype=np.float32), followers=np.zeros(0, dtype=np.float32),
    )  # fmt: skip


def test_a_token_that_determines_its_picks_is_learnt_and_foretold() -> None:
    trace = spoken(40, 30)
    made = fit(trace, knows_nothing())
    assert made.report["recall"]["token"] == 1
    assert made.report["recall"]["tokens"] > 0.99
    assert made.report["recall"]["popularity"] < 0.7
    assert (made.vocabulary, made.sequences, made.model) == (TOKENS, 40, "spoken")
    later = spoken(5, 30, seed=3)
    of = TokenTables(made, later.catalogue())
    sequences, positions = np.repeat(np.arange(5), 30), np.tile(np.arange(30), 5)
    assert later.token is not None
    found = of.chances(sequences, positions, later.token).reshape(-1, LAYERS, EXPERTS)
    likeliest = np.sort(np.argsort(-found, axis=2)[:, :, :K], axis=2)
    assert (likeliest == np.sort(later.experts, axis=2)).mean() > 0.99
    picked = np.zeros_like(found, dtype=bool)
    np.put_along_axis(picked, later.experts.astype(np.intp), True, axis=2)
    assert found[picked].mean() > 0.9
    assert found[~picked].mean() < 0.05


def test_pairs_say_what_tokens_do_not() -> None:
    recall = fit(spoken(80, 60, by="pair"), knows_nothing()).report["recall"]
    assert recall["tokens"] > 0.9
    assert recall["token"] < 0.6


def test_what_a_sequence_does_with_its_tokens_is_foretold_from_its_own_rows() -> None:
    recall = fit(spoken(40, 60, by="sequence"), knows_nothing()).report["recall"]
    assert recall["picks"] > 0.8
    assert recall["past"] < 0.5


def test_chances_are_calibrated_on_sequences_that_were_not_learnt_from() -> None:
    made, later = fit(spoken(60, 40, noise=0.3), knows_nothing()), spoken(30, 40, seed=9, noise=0.3)
    assert later.token is not None
    of = TokenTables(made, later.catalogue())
    sequences, positions = np.repeat(np.arange(30), 40), np.tile(np.arange(40), 30)
    found = of.chances(sequences, positions, later.token).reshape(-1, LAYERS, EXPERTS)
    picked = np.zeros_like(found, dtype=bool)
    np.put_along_axis(picked, later.experts.astype(np.intp), True, axis=2)
    for low, high in ((0, 0.2), (0.5, 1)):
        some = (found >= low) & (found < high)
        assert some.any()
        assert abs(picked[some].mean() - found[some].mean()) < 0.06


def test_no_more_rows_are_kept_than_there_is_room_for_and_tokens_come_first() -> None:
    trace = spoken(40, 30)
    row = LAYERS * EXPERTS + 4
    made = fit(trace, knows_nothing(), FitOptions(max_bytes=(3 * TOKENS + 5) * row + 3 * 12))
    rows = made.report["rows"]
    assert (rows["token"], rows["before"], rows["two_before"]) == (TOKENS,) * 3
    assert 0 < rows["pair"] + rows["triple"] + rows["pair_before"] <= 5
    few = fit(trace, knows_nothing(), FitOptions(max_bytes=4 * row)).report
    assert sum(few["rows"].values()) == 4
    assert few["left_out"]["pair"] > 50


def test_the_same_routing_and_seed_give_the_same_and_every_layer_is_told_of() -> None:
    done: list[int] = []
    trace = spoken(40, 30, noise=0.2)
    one, other = fit(trace, knows_nothing(), on_layer=done.append), fit(trace, knows_nothing())
    assert done == [1, 2]
    for name, array in one.tensors.items():
        assert array.tolist() == other.tensors[name].tolist()


def test_where_time_is_short_the_weights_are_those_of_another_model() -> None:
    hurried = fit(spoken(40, 30), knows_nothing(), FitOptions(seconds=0.0))
    weights = hurried.tensors["weights"]
    assert weights.shape == (len(MODES), len(feature_names(len(KEEP))), LAYERS)
    assert (weights[:, : len(GRAMS)] == weights[0, : len(GRAMS), :1]).all()
    assert hurried.report["recall"]["tokens"] > 0.9, "the tables are counted all the same"


def test_a_text_that_is_numbered_as_unknown_is_in_no_table() -> None:
    trace = spoken(40, 30)
    texts = tuple(f"t{number}" for number in range(TOKENS - 1))
    made = fit(replace(trace, token_texts=texts), knows_nothing())
    assert made.tensors["tokens"].tolist() == list(range(TOKENS - 1))
    assert made.vocabulary == TOKENS


def with_a_secret(sequences: int) -> RoutingTrace:
    """So many of 40 sequences begin with ids 100 to 109; all have tokens 0 to 9, in orders of their own."""
    trace = spoken(40, 30)
    assert trace.token is not None
    token = trace.token.reshape(40, 30).copy()
    token[10 : 10 + sequences, :10] = 100 + np.arange(10)
    return replace(trace, token=token.ravel())


def ids_in(made: PathsFile) -> dict[str, set[tuple[int, ...]]]:
    tokens = made.tensors["tokens"]
    return {name: {tuple(row) for row in tokens[made.tensors[f"{name}.keys"]].tolist()} for name in GRAMS}


def test_what_fewer_sequences_share_is_in_no_table_and_no_list() -> None:
    trace = with_a_secret(4)
    leaking = fit(trace, knows_nothing())
    assert (100, 101, 102) in ids_in(leaking)["triple"], "whoever has the file reads the text"
    made = fit(trace, knows_nothing(), FitOptions(least_sequences=5))
    assert made.tensors["tokens"].tolist() == list(range(TOKENS))
    assert (made.vocabulary, made.report["rare_tokens"], made.report["least_sequences"]) == (TOKENS, 10, 5)
    assert trace.token is not None
    rows = trace.token.reshape(40, 30)[:36].tolist()
    for name, offsets in GRAMS.items():
        for ids in ids_in(made)[name]:
            found = (any(_at(row, place, offsets) == ids for place in range(30)) for row in rows)
            assert sum(found) >= 5, f"{name} {ids}"
    assert ids_in(made)["triple"], "some are shared by enough"
    assert made.report["left_out"]["token"] == 10
    assert made.report["left_out"]["triple"] > leaking.report["left_out"]["triple"] == 0
    shared = fit(with_a_secret(5), knows_nothing(), FitOptions(least_sequences=5))
    assert (100, 101, 102) in ids_in(shared)["triple"]
    assert shared.vocabulary == 110


def _at(row: list[int], place: int, offsets: tuple[int, ...]) -> tuple[int, ...] | None:
    return tuple(row[place - back] for back in offsets) if place >= max(offsets) else None


def test_where_nothing_is_shared_the_tables_are_empty_and_still_foretell() -> None:
    trace = spoken(40, 30)
    lone = replace(trace, token=np.arange(trace.tokens))
    made = PathsFile.parse(fit(lone, knows_nothing(), FitOptions(least_sequences=2)).dump())
    assert (len(made.tensors["tokens"]), made.vocabulary, made.report["rare_tokens"]) == (0, 1, 36 * 30)
    found = TokenTables(made, trace.catalogue()).chances(np.zeros(2, int), np.arange(2), np.array([3, 900]))
    assert np.isfinite(found).all()


def test_one_sequences_odd_id_does_not_make_the_vocabulary_larger() -> None:
    trace = spoken(40, 30)
    assert trace.token is not None
    token = trace.token.copy()
    token[7] = LARGEST_VOCABULARY - 1
    odd = replace(trace, token=token)
    assert fit(odd, knows_nothing(), FitOptions(least_sequences=2)).vocabulary == TOKENS
    assert fit(odd, knows_nothing()).vocabulary == LARGEST_VOCABULARY
    token[-1], token[7] = 5000, 0
    assert fit(odd, knows_nothing()).vocabulary == TOKENS, "held out, so it is in no table"
    assert fit(odd, knows_nothing(), FitOptions(vocabulary=9000)).vocabulary == 9000


@pytest.mark.parametrize(
    ("field", "value"), [("vocabulary", LARGEST_VOCABULARY + 1), ("vocabulary", 0), ("least_sequences", 0)]
)
def test_options_that_no_file_can_have_are_refused_before_anything_is_fitted(field: str, value: int) -> None:
    with pytest.raises(InvalidConfig, match=field):
        FitOptions(**{field: value})


def test_what_can_not_be_learnt_from_is_refused_by_name() -> None:
    trace = spoken(40, 30)
    with pytest.raises(TraceError, match="no array token"):
        fit(replace(trace, token=None), knows_nothing())
    with pytest.raises(TraceError, match="below 5, the model's vocabulary"):
        fit(trace, knows_nothing(), FitOptions(vocabulary=5))
    with pytest.raises(InvalidConfig, match="reuse"):
        fit(trace, knows_nothing((EXPERTS,)))
    with pytest.raises(InvalidConfig, match="at least 500 tokens"):
        fit(spoken(10, 30), knows_nothing())
