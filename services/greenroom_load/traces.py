"""Recorded arrivals from a CSV: the Azure LLM inference traces, and others with such columns."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from greenroom.core.errors import InvalidConfig

_TIME = ("timestamp", "arrived_at", "time")
_INPUT = ("contexttokens", "request tokens", "num_prefill_tokens", "input_tokens")
_OUTPUT = ("generatedtokens", "response tokens", "num_decode_tokens", "output_tokens")
_ALLOWED = "a CSV with the columns TIMESTAMP,ContextTokens,GeneratedTokens, the last two optional"


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded request: seconds since the first of its trace, and its lengths where the trace has them."""

    at_s: float
    input_tokens: int | None = None
    output_tokens: int | None = None


def read_trace(path: Path, *, field: str = "trace") -> tuple[Recorded, ...]:
    """The requests of a trace in the order of their times, the first at 0.

    Times are ISO dates (``2023-11-16 18:15:46.6805900``) or seconds. Raises InvalidConfig, naming the line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            columns = {name.strip().lower(): place for place, name in reversed(list(enumerate(next(rows, []))))}
            time = _column(columns, _TIME)
            if time is None:
                raise InvalidConfig(field, str(path), _ALLOWED)
            places = time, _column(columns, _INPUT), _column(columns, _OUTPUT)
            found = [_request(row, places, f"{path}, line {rows.line_num}", field) for row in rows if row]
    except OSError as error:
        raise InvalidConfig(field, str(path), f"{_ALLOWED} ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidConfig(field, str(path), f"{_ALLOWED} ({error})") from error
    if not found:
        raise InvalidConfig(field, str(path), f"{_ALLOWED}; this one has no requests")
    found.sort(key=lambda request: request.at_s)
    first = found[0].at_s
    return tuple(Recorded(one.at_s - first, one.input_tokens, one.output_tokens) for one in found)


def _column(columns: Mapping[str, int], names: tuple[str, ...]) -> int | None:
    return next((columns[name] for name in names if name in columns), None)


def _request(row: list[str], places: tuple[int, int | None, int | None], where: str, field: str) -> Recorded:
    def tokens(place: int | None) -> int | None:
        if place is None or not row[place].strip():
            return None
        count = int(float(row[place]))
        if count < 0:
            raise ValueError
        return count

    try:
        time, prompt, answer = places
        return Recorded(_seconds(row[time].strip()), tokens(prompt), tokens(answer))
    except (ValueError, IndexError, OverflowError):
        raise InvalidConfig(field, where, f"{_ALLOWED}; this line reads {','.join(row)[:80]!r}") from None


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        return datetime.fromisoformat(text).timestamp()
    if not -1e12 < seconds < 1e12:
        raise ValueError(text)
    return seconds
