"""What a checkpoint says of sampling in its generation_config.json, or in its GGUF file, for requests that do not
say."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from greenroom.core.errors import CorruptCheckpoint, InvalidRequest
from greenroom.core.generation import SamplingParams
from greenroom.gguf.shards import read_gguf

GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of SamplingParams' fields of the same names. None: the file does not say.

    These are the fields that vLLM takes from there too, but for ``max_new_tokens``: how long an answer may be is for
    the server and its clients to say. As in vLLM ``do_sample`` is passed over: a request that wants the likeliest token
    says ``temperature: 0``.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def said(self) -> dict[str, Any]:
        """The fields that have a value."""
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if value is not None}


NO_DEFAULTS = SamplingDefaults()


def read_sampling_defaults(place: Path) -> SamplingDefaults:
    """Of the checkpoint in the folder ``place``, or of a GGUF file; none where it says nothing. Raises
    CorruptCheckpoint for a file that can not be read, and for a value that no request may have."""
    if place.is_file():
        return _checked(_of_gguf(place), place)
    path = place / GENERATION_FILE
    try:
        defaults = msgspec.json.decode(path.read_bytes(), type=SamplingDefaults)
    except FileNotFoundError:
        return NO_DEFAULTS
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} can not be read: {error}; {_INSTEAD}") from error
    return _checked(defaults, path)


def _of_gguf(path: Path) -> SamplingDefaults:
    said = read_gguf(path).metadata
    at = "general.sampling"
    return SamplingDefaults(
        temperature=said.number(f"{at}.temp", None),
        top_p=said.number(f"{at}.top_p", None),
        top_k=said.count(f"{at}.top_k", None, least=-1),
        min_p=said.number(f"{at}.min_p", None),
        repetition_penalty=said.number(f"{at}.penalty_repeat", None),
    )


def _checked(defaults: SamplingDefaults, path: Path) -> SamplingDefaults:
    if defaults.top_k == -1:
        defaults = replace(defaults, top_k=0)  # both are off
    try:
        SamplingParams(**defaults.said())
    except InvalidRequest as error:
        raise CorruptCheckpoint(f"{path}: {error}; {_INSTEAD}") from error
    return defaults


_INSTEAD = "with --generation-config none it is not read"
