"""What foretells a token's picks: of each token a score for every expert of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.expertflow.routings import Files, network, tables
from benchmarks.harness.inputs.fitted import FitBoth
from benchmarks.harness.inputs.kept_fits import Kept
from benchmarks.harness.inputs.split_routing import World
from benchmarks.harness.reporting.progress import progress
from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.t5 import T5Shape
from greenroom.core.artifacts.reuse_file import ReuseFile
from greenroom.policies.base.array_types import Ids, Mask, Scores
from greenroom.policies.base.events import Phase
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.expertflow.t5_paths import T5Paths
from greenroom.policies.expertflow.token_tables import Past, TokenTables
from greenroom.predictor.kinds.path.fit import sequence_logits
from greenroom.predictor.kinds.paths.t5_training import T5Options
from greenroom.replay import RoutingTrace
from greenroom.replay.traces.token_numbers import tokens_of, vocabulary_of

POPULARITY, PREVIOUS, PAST, TOKEN = "popularity", "previous token (TLP)", "own past", "token table"
TABLES, TABLES_PAST, SLP = "tables", "tables with past", "layer before (SLP)"
SHARED_BY: Final = 5
"""Sequences that a token must have been seen in, by default of the predictor service."""
TABLES_SHARED: Final = f"the same, shared by {SHARED_BY}"
T5_LITERAL, T5_ALONE, T5_PAST = "T5 without context", "T5", "T5 with past"
WITHOUT_CONTEXT: Final = T5Shape(window=1)
"""The paper's "sequence length 1 in decoding": a row knows its token and the prompt."""
SIMPLE: Final = (POPULARITY, PREVIOUS, TOKEN)
"""What the tables are compared with."""
SHRINK: Final = 4.0
"""A token's share counts as so many tokens of the popularity."""

MakesScores = Callable[[], Scores]
_ALL_SEQUENCES: Final = 2**30


def foretellers(world: World, files: Files, fit: FitBoth, options: T5Options) -> dict[str, MakesScores]:
    """Each makes the scores ``[rows, N]`` of ``world.rows``. All but SLP, which needs the picks of the layer before,
    know nothing of the forward. Memory is for one at a time. What ``files`` has not is fitted now, or was before."""
    catalogue = world.measured.catalogue()
    popularity = picked(catalogue, world.fitted).mean(axis=0, dtype=np.float64).astype(np.float32)
    past = past_logits(world.measured, catalogue, files.reuse)
    without_context = replace(options, shape=WITHOUT_CONTEXT)

    def shared() -> PathsFile:
        return tables(world.name, world.fitted, files.reuse, fit, Kept.usual(), SHARED_BY)

    return {
        POPULARITY: lambda: np.broadcast_to(popularity, (len(world.rows), catalogue.size)),
        PREVIOUS: lambda: picked(catalogue, world.measured)[world.rows - 1] + popularity / 2,
        PAST: lambda: past[world.rows],
        TOKEN: lambda: by_token(world, catalogue, popularity),
        SLP: lambda: by_layer_before(world, catalogue, popularity),
        TABLES: lambda: by_tables(world, catalogue, files.paths, None),
        TABLES_PAST: lambda: by_tables(world, catalogue, files.paths, past),
        TABLES_SHARED: lambda: by_tables(world, catalogue, shared(), past),
        T5_LITERAL: lambda: by_t5(world, catalogue, network(world, files, without_context), None),
        T5_ALONE: lambda: by_t5(world, catalogue, network(world, files, options), None),
        T5_PAST: lambda: by_t5(world, catalogue, network(world, files, options), past),
    }


def picked(catalogue: Catalogue, trace: RoutingTrace) -> Mask:
    """``[tokens, N]``: what each row has picked."""
    found: Mask = np.zeros((trace.tokens, catalogue.size), dtype=np.bool_)
    rows, layers, places = np.nonzero(trace.experts < catalogue.experts_per_layer[:, None])
    found[rows, catalogue.first[layers] + trace.experts[rows, layers, places]] = True
    return found


def past_logits(trace: RoutingTrace, catalogue: Catalogue, reuse: ReuseFile) -> Scores:
    """``[tokens, N]``: by what `reuse` knows of each row's sequence; NaN where that has no row before."""
    found: Scores = np.full((trace.tokens, catalogue.size), np.nan, dtype=np.float32)
    for layer, span in enumerate(catalogue.spans):
        known = sequence_logits(trace, layer, reuse)
        found[known.rows, span] = known.logits
    return found


def by_token(world: World, catalogue: Catalogue, popularity: Scores) -> Scores:
    """Counted: how often each expert was picked by a row of the same token."""
    tokens, size = tokens_of(world.fitted), max(vocabulary_of(world.fitted), vocabulary_of(world.measured))
    own = picked(catalogue, world.fitted)
    order = np.argsort(tokens, kind="stable")
    known, begin, counts = np.unique(tokens[order], return_index=True, return_counts=True)
    sums = np.add.reduceat(own[order].astype(np.float32), begin, axis=0)
    shares = np.tile(popularity, (len(known) + 1, 1))  # the last: of tokens that were never seen
    shares[:-1] = (sums + SHRINK * popularity) / (counts[:, None] + SHRINK)
    place = np.full(size, len(known))
    place[known] = np.arange(len(known))
    found: Scores = shares[place[tokens_of(world.measured)[world.rows]]]
    return found


def by_layer_before(world: World, catalogue: Catalogue, popularity: Scores) -> Scores:
    """Counted: P(expert of layer l + 1 | expert of layer l), added up over the token's picks in layer l."""
    learnt, own = picked(catalogue, world.fitted), picked(catalogue, world.measured)[world.rows]
    found: Scores = np.empty(own.shape, dtype=np.float32)
    found[:, catalogue.spans[0]] = popularity[catalogue.spans[0]]
    for source, target in zip(catalogue.spans[:-1], catalogue.spans[1:], strict=True):
        given = learnt[:, source].astype(np.float32)
        together = given.T @ learnt[:, target].astype(np.float32)
        shares = (together + SHRINK * popularity[target]) / (given.sum(axis=0)[:, None] + SHRINK)
        found[:, target] = own[:, source].astype(np.float32) @ shares
    return found


def by_tables(world: World, catalogue: Catalogue, file: PathsFile, past: Scores | None) -> Scores:
    """With ``past`` they are told of the picks too."""
    return by_paths(world, catalogue, TABLES, lambda known: TokenTables(file, catalogue, known), past)


def by_t5(world: World, catalogue: Catalogue, file: PathsFile, past: Scores | None) -> Scores:
    """Its cache holds all sequences: none loses its place."""
    return by_paths(
        world, catalogue, "T5", lambda known: T5Paths(file, catalogue, known, cache_bytes=_ALL_SEQUENCES), past
    )


def by_paths(
    world: World, catalogue: Catalogue, name: str, made: Callable[[Past | None], TokenPaths], past: Scores | None
) -> Scores:
    """As they are asked while sequences decode: token after token, of all sequences at once."""
    trace = world.measured
    tokens, starts = tokens_of(trace), trace.seq_starts
    at: Ids = np.zeros(trace.sequences, dtype=np.int64)  # the row that each sequence has come to
    paths = made(None if past is None else lambda sequences: past[at[sequences]])
    for sequence, prompt in enumerate(measured_prompts(world)):
        paths.begin(sequence, prompt)
    found: Scores = np.empty((trace.tokens, catalogue.size), dtype=np.float32)
    longest = int(np.diff(starts).max())
    with progress(longest, f"{world.name}: {name}", "token") as bar:
        for position in range(longest):
            sequences = np.flatnonzero(np.diff(starts) > position)
            rows = starts[sequences] + position
            at[sequences] = rows
            positions = np.full(len(rows), position, dtype=np.int64)
            found[rows] = paths.chances(sequences, positions, tokens[rows])
            if past is not None:
                paths.picked(sequences, positions, trace.experts[rows])
            bar.update()
    return found[world.rows]


def measured_prompts(world: World) -> list[Ids]:
    """Of each sequence that is measured."""
    trace = world.measured
    if world.prompts is not None:
        return list(world.prompts[world.fitted.sequences :])
    tokens = tokens_of(trace)
    asked = np.zeros(trace.tokens, dtype=np.bool_) if trace.phase is None else trace.phase != Phase.DECODE
    rows = [slice(*span) for span in pairwise(trace.seq_starts.tolist())]
    return [tokens[own][asked[own]] for own in rows]


def named(catalogue: Catalogue, scores: Scores) -> Mask:
    """``[rows, N]``: in each layer as many experts of the highest scores as a row picks."""
    found: Mask = np.zeros(scores.shape, dtype=np.bool_)
    for span, k in zip(catalogue.spans, catalogue.top_k.tolist(), strict=True):
        own = scores[:, span]
        order = np.argsort(-own, axis=1, kind="stable")[:, :k]
        np.put_along_axis(found[:, span], order, True, axis=1)
    return found


def uniform(catalogue: Catalogue, rows: int, seed: int = 0) -> Mask:
    """``[rows, N]``: experts at random."""
    draws: NDArray[np.floating] = np.random.default_rng(seed).random((rows, catalogue.size), dtype=np.float32)
    return named(catalogue, draws)
