"""Routing paths from tables of tokens: ExpertFlow's predictor (section 3.1) without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from greenroom.core.artifacts.paths_file import PathsFile
from greenroom.core.artifacts.paths_forms.tables import (
    ALONE,
    GRAMS,
    OWN_PICKS,
    PAST,
    PICKS,
    TABLES,
    codes_of,
    feature_names,
)
from greenroom.core.errors import InvalidConfig
from greenroom.policies.base.array_types import Ids, Scores
from greenroom.policies.base.expert_keys import Catalogue
from greenroom.policies.base.logistic import chances_of
from greenroom.policies.base.token_paths import TokenPaths
from greenroom.policies.expertflow.token_histories import TokenHistory

Past = Callable[[Ids], Scores | None]
"""``ExpertPolicy.past_logits``."""

_ROWS_AT_ONCE: Final = 64
"""Their logits stay in a core's cache until they are added up."""
_FIRST_ROOM: Final = 4
_UNKNOWN: Final = -1

Rows = NDArray[np.intp]


class TokenTables(TokenPaths):
    """A row's logits are sums. What is added: rows of tables, found by its token and the two before it; averages of the
    token table over all earlier tokens; its sequence's past; and what earlier rows of its sequence with the same token
    have picked. Each counts by a weight that is its layer's, and depends on what is known of the sequence.

    A token without rows in the tables is foretold by the past. Without ``past``, or where it is NaN, only tokens count.
    Equal asks get equal answers, whatever rows are asked for with them.
    """

    def __init__(
        self, file: PathsFile, catalogue: Catalogue, past: Past | None = None, *, vocabulary: int | None = None
    ) -> None:
        """``vocabulary``: how many token ids the model knows. Raises InvalidConfig for a file of another form, model or
        vocabulary.
        """
        if file.form != TABLES:
            raise InvalidConfig("form", file.form, TABLES)
        file.check_model(tuple(catalogue.experts_per_layer.tolist()), vocabulary)
        self.version = str(file.version)
        self.catalogue = catalogue
        self._past = past
        tensors, layer_of = file.tensors, catalogue.layer_of
        self._popularity: Scores = tensors["popularity"]
        self._bias: Scores = tensors["bias"] + self._popularity
        self._keep: Scores = tensors["keep"][:, None]
        names = feature_names(len(self._keep))
        self._weights = {name: tensors["weights"][:, row][:, layer_of] for row, name in enumerate(names)}
        """By feature ``[3, N]``, for each mode."""
        known: NDArray[np.uint32] = tensors["tokens"]
        self._known = len(known)
        self._place_of = np.full(file.vocabulary + 1, _UNKNOWN, dtype=np.int32)  # the last: of ids beyond it
        self._place_of[known] = np.arange(self._known)
        self._codes = {name: codes_of(tensors[f"{name}.keys"], self._known) for name in GRAMS}
        self._logits: dict[str, NDArray[np.int8]] = {name: tensors[f"{name}.logits"] for name in GRAMS}
        self._unit = {name: tensors[f"{name}.unit"][0] for name in GRAMS}
        self._histories: dict[int, TokenHistory] = {}
        self._free: list[int] = []
        self._averages: Scores = np.zeros((0, len(self._keep), catalogue.size), dtype=np.float32)

    @property
    def nbytes(self) -> int:
        """What the tables take in memory, without what is remembered of sequences."""
        arrays = [*self._weights.values(), *self._codes.values(), *self._logits.values(), self._place_of, self._bias]
        return sum(one.nbytes for one in arrays)

    def chances(self, sequences: Ids, positions: Ids, tokens: Ids) -> Scores:
        found: Scores = np.empty((len(tokens), self.catalogue.size), dtype=np.float32)
        if not len(tokens):
            return found
        ids = np.where(tokens >= 0, tokens, _UNKNOWN).astype(np.int64)
        distinct, of_row = np.unique(sequences, return_inverse=True)
        groups = np.split(np.argsort(of_row, kind="stable"), np.cumsum(np.bincount(of_row))[:-1])
        histories = [self._history(one) for one in distinct.tolist()]
        self._fold(histories, [int(positions[rows[0]]) for rows in groups])
        back = np.empty((len(tokens), 3), dtype=np.int64)
        same = np.empty((len(OWN_PICKS), len(tokens)), dtype=np.int64)
        for history, rows in zip(histories, groups, strict=True):
            history.add(ids[rows])
            back[rows] = history.before(len(rows))
            same[:, rows] = history.same(len(rows))
        places = self._places(back)
        at = {name: self._at(name, places) for name in GRAMS}
        context = np.empty((len(tokens), *self._averages.shape[1:]), dtype=np.float32)
        self._run(self._averages[[one.slot for one in histories]], of_row, at["token"], context)
        past, modes = self._known_of(distinct, histories)
        for mode in np.unique(modes).tolist():
            of_mode = np.flatnonzero(modes[of_row] == mode)
            for begin in range(0, len(of_mode), _ROWS_AT_ONCE):
                rows = of_mode[begin : begin + _ROWS_AT_ONCE]
                logits = np.empty((len(rows), self.catalogue.size + 1), dtype=np.float32)  # the last: no pick
                own = logits[:, :-1]
                own[:] = self._bias[mode]
                for name in GRAMS:
                    self._add_rows(own, name, at[name][rows], mode)
                for number in range(len(self._keep)):
                    own += self._weights[f"context_{number}"][mode] * context[rows, number]
                if mode != ALONE:
                    self._add_past(own, past[of_row[rows]], at["token"][rows] < 0, mode)
                if mode == PICKS:
                    self._add_picks(logits, [histories[one] for one in of_row[rows].tolist()], same[:, rows])
                found[rows] = chances_of(own)
        return found

    def picked(self, sequences: Ids, positions: Ids, picks: NDArray[np.integer]) -> None:
        catalogue = self.catalogue
        keys = picks.astype(np.int64) + catalogue.first[:-1, None]
        keys[picks >= catalogue.experts_per_layer[:, None]] = catalogue.size
        flat = keys.reshape(len(picks), -1)
        for sequence in np.unique(sequences).tolist():
            if (history := self._histories.get(sequence)) is not None:
                rows = np.flatnonzero(sequences == sequence)
                history.picked(positions[rows], flat[rows])

    def end(self, sequence: int) -> None:
        if (history := self._histories.pop(sequence, None)) is not None:
            self._free.append(history.slot)

    # -- what is remembered ----------------------------------------------------------------------------------------

    def _history(self, sequence: int) -> TokenHistory:
        if sequence not in self._histories:
            if not self._free:
                room = max(len(self._averages), _FIRST_ROOM)
                self._free = list(range(len(self._averages), len(self._averages) + room))
                more = np.zeros((room, *self._averages.shape[1:]), dtype=np.float32)
                self._averages = np.concatenate((self._averages, more))
            slot = self._free.pop()
            self._averages[slot] = 0
            width = int(self.catalogue.top_k.max()) * self.catalogue.layers
            self._histories[sequence] = TokenHistory(slot, width, self.catalogue.size)
        return self._histories[sequence]

    def _fold(self, histories: list[TokenHistory], positions: list[int]) -> None:
        """The averages take the tokens before ``positions``."""
        groups, ids = [], []
        for number, (history, position) in enumerate(zip(histories, positions, strict=True)):
            own, anew = history.ask(position)
            if anew:
                self._averages[history.slot] = 0
            groups.append(np.full(len(own), number))
            ids.append(own)
        places = self._places(np.concatenate(ids))[:, None]
        slots = [one.slot for one in histories]
        running = self._averages[slots]
        self._run(running, np.concatenate(groups), self._at("token", places), None)
        self._averages[slots] = running

    def _run(self, running: Scores, groups: Ids, at: Rows, before: Scores | None) -> None:
        """Take tokens into the averages ``running[S, C, N]`` of ``groups[T]``, in place.

        ``at[T]``: rows of the token table, -1: none. ``before[T, C, N]`` is set to what the averages were before each;
        then the last ones are not taken.
        """
        gain, table, unit = 1 - self._keep, self._logits["token"], self._unit["token"]
        ranks = _by_rank(groups, len(running))
        for number, rows in enumerate(ranks):
            of_rows = groups[rows]
            own = running[of_rows]
            if before is not None:
                before[rows] = own
                if number == len(ranks) - 1:
                    return  # what comes after the last one nobody asks for
            own *= self._keep
            known = np.flatnonzero(at[rows] >= 0)
            if len(known):
                own[known] += gain * np.multiply(table[at[rows[known]]], unit, dtype=np.float32)[:, None]
            running[of_rows] = own

    def _known_of(self, sequences: Ids, histories: list[TokenHistory]) -> tuple[Scores, Ids]:
        """Of each sequence how much likelier each expert is by its past, 0 where that is not known; and its mode."""
        past = None if self._past is None else self._past(sequences)
        if past is None:
            nothing: Scores = np.zeros((0, self.catalogue.size), dtype=np.float32)
            return nothing, np.full(len(sequences), ALONE)
        has_picks = np.array([one.has_picks for one in histories])
        modes = np.where(np.isnan(past).all(axis=1), ALONE, np.where(has_picks, PICKS, PAST))
        above: Scores = past - self._popularity
        above[~np.isfinite(above)] = 0
        return above, modes

    # -- sums ------------------------------------------------------------------------------------------------------

    def _places(self, back: Ids) -> Ids:
        """Of ids, -1 being none, their places among the tokens that there are tables of."""
        found: Ids = self._place_of[np.minimum(back, len(self._place_of) - 1)].astype(np.int64)
        return found

    def _at(self, name: str, places: Ids) -> Rows:
        """``[T]``: the row of a table for each row's tokens ``places[T, 3]``, -1 where it has none."""
        columns, codes = places[:, GRAMS[name]], self._codes[name]
        if not len(codes):
            return np.full(len(places), _UNKNOWN, dtype=np.intp)
        asked = codes_of(np.maximum(columns, 0), self._known)
        found = np.minimum(np.searchsorted(codes, asked), len(codes) - 1)
        return np.where((columns >= 0).all(axis=1) & (codes[found] == asked), found, _UNKNOWN)

    def _add_rows(self, logits: Scores, name: str, at: Rows, mode: int) -> None:
        has = np.flatnonzero(at >= 0)
        if len(has):
            logits[has] += np.multiply(
                self._logits[name][at[has]], self._weights[name][mode] * self._unit[name], dtype=np.float32
            )

    def _add_past(self, logits: Scores, past: Scores, unknown: NDArray[np.bool_], mode: int) -> None:
        logits += self._weights["past"][mode] * past
        has = np.flatnonzero(unknown)
        if len(has):
            logits[has] += self._weights["past_of_unknown"][mode] * past[has]

    def _add_picks(self, logits: Scores, histories: list[TokenHistory], same: Ids) -> None:
        for name, of_rows in zip(OWN_PICKS, same, strict=True):
            has = np.flatnonzero(of_rows >= 0)
            if not len(has):
                continue
            logits[has, :-1] += self._weights[f"has_{name}"][PICKS]
            keys = np.concatenate([histories[row].keys_of(of_rows[row : row + 1]) for row in has.tolist()])
            adds = np.append(self._weights[name][PICKS], np.float32(0))
            logits[has[:, None], keys] += adds[keys]


def _by_rank(groups: Ids, count: int) -> list[Rows]:
    """The first row of each group, then the second of each, and so on."""
    if not len(groups):
        return []
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=count)
    if int(sizes.max()) == 1:
        return [order]
    rank = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    by_rank = np.argsort(rank, kind="stable")
    return np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1])
