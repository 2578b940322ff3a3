"""The file of texts beside a trace: JSON Lines, line i of sequence i."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from greenroom.core.artifacts.paths_file import LARGEST_VOCABULARY
from greenroom.policies.base.array_types import Counts
from greenroom.replay.traces.trace_file import TraceError

TOKENS: Final = "decode_tokens"


@dataclass(frozen=True, slots=True, eq=False)
class WrittenTokens:
    """``ids[tokens]``: the token that is each row's input. ``texts``: what each id stands for, where texts were
    written in place of ids; they are numbered by first appearance in the file."""

    ids: Counts
    texts: tuple[str, ...] | None


def meta_beside(trace: Path) -> Path:
    """Where the texts of the trace ``NAME.npz`` are: ``NAME.meta.jsonl``."""
    return trace.with_suffix(".meta.jsonl")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Each line's object. Raises TraceError, naming the line; blank ones at the end are left out, and so is the mark
    of byte order that some editors begin a file with."""
    try:
        lines = path.read_text("utf-8-sig").rstrip().split("\n")
    except (OSError, ValueError) as error:
        raise TraceError(f"{path} can not be read: {error}") from error
    for number, line in enumerate(lines if lines != [""] else (), start=1):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: line {number} is no JSON: {error}") from error
        if not isinstance(found, dict):
            raise TraceError(f"{path}: line {number} is no JSON object")
        yield found


def read_tokens(path: Path, seq_starts: Counts) -> WrittenTokens | None:
    """The tokens of a trace's rows, out of ``decode_tokens`` of the meta file at ``path``.

    Entry i of a line is the input of row i of its sequence. The list may be one longer than the rows, because the last
    token of an answer is an input of none. None where no line has such a list, or where there is no file. Raises
    TraceError, naming the line.
    """
    if not path.exists():
        return None
    lists = [line.get(TOKENS) for line in read_lines(path)]
    if all(one is None for one in lists):
        return None
    rows = np.diff(seq_starts).tolist()
    if len(lists) != len(rows):
        missing = f", so line {len(lists) + 1} is missing" if len(lists) < len(rows) else ""
        raise TraceError(f"{path} has {len(lists)} lines and the trace {len(rows)} sequences{missing}")
    kinds: set[type] = set()
    inputs: list[Any] = []
    for number, (tokens, count) in enumerate(zip(lists, rows, strict=True), start=1):
        inputs += _inputs(tokens, count, kinds, f"{path}: line {number}: {TOKENS}")
    if kinds != {str}:
        return WrittenTokens(np.array(inputs, dtype=np.int64), None)
    numbers: dict[str, int] = {}
    ids = np.array([numbers.setdefault(text, len(numbers)) for text in inputs], dtype=np.int64)
    return WrittenTokens(ids, tuple(numbers))


def _inputs(tokens: object, rows: int, kinds: set[type], where: str) -> Sequence[Any]:
    if not isinstance(tokens, list):
        raise TraceError(f"{where} must be a list of tokens, as in the other lines")
    if len(tokens) not in (rows, rows + 1):
        raise TraceError(f"{where} has {len(tokens)} tokens; its sequence has {rows} rows, so {rows} or {rows + 1}")
    kinds.update(map(type, tokens))
    if not kinds <= {str} and not kinds <= {int}:
        raise TraceError(f"{where} must be ids or texts in all lines, not {' and '.join(sorted(_named(kinds)))}")
    if kinds == {int} and tokens and not 0 <= min(tokens) <= max(tokens) < LARGEST_VOCABULARY:
        row = next(place for place, one in enumerate(tokens) if not 0 <= one < LARGEST_VOCABULARY)
        raise TraceError(f"{where}: row {row} must be an id from 0 to {LARGEST_VOCABULARY - 1:,}")
    return tokens[:rows]


def _named(kinds: set[type]) -> Iterator[str]:
    return ({int: "ids", str: "texts"}.get(kind, kind.__name__) for kind in kinds)
