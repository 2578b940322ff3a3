"""The file of a linear head's weights. docs/architecture/tasktype.md describes its format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from greenroom.core.errors import InvalidConfig
from greenroom.core.units import MIB
from greenroom.tasktype.extractor import UNKNOWN
from greenroom.tasktype.extractor_file import read_extractor_file

MAX_FILE_BYTES: Final = 16 * MIB

Name = Annotated[str, Meta(min_length=1, max_length=64)]
Finite = Annotated[float, Meta(ge=-1e6, le=1e6)]
Step = Annotated[int, Meta(ge=-32768, le=32767)]


class Weights(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A head by features. A score is ``bias`` + Σ value of a feature · ``scale`` · its steps.

    ``features``: the name of the ``PromptFeatures`` that they are for. ``task_types``: what the columns are for;
    ``unknown``, which may be the last, for texts that ask for nothing. ``temperature``: scores are divided by it before
    they become probabilities. ``least_probability``: below it the answer is ``unknown`` (see ``most_probable``).
    ``card``: where the weights come from, for people.
    """

    format: Literal["greenroom-task-weights"]
    version: Literal[1]
    features: str
    task_types: Annotated[tuple[Name, ...], Meta(min_length=2, max_length=1000)]
    temperature: Annotated[float, Meta(gt=0, le=100)]
    least_probability: Annotated[float, Meta(ge=0, lt=1)]
    scale: Annotated[float, Meta(gt=0, le=1)]
    bias: tuple[Finite, ...]
    weights: Annotated[dict[str, tuple[Step, ...]], Meta(min_length=1, max_length=200_000)]
    card: dict[str, Any] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The task types that an answer may be."""
        return self.task_types[:-1] if self.task_types[-1] == UNKNOWN else self.task_types


def load_weights(path: Path | None = None) -> Weights:
    """Read ``path``; None: the weights that come with greenroom. Raises InvalidConfig, naming the place."""
    shipped = "greenroom.tasktype.linear", "default_weights.json"
    return parse_weights(*read_extractor_file(path, "weights", shipped, MAX_FILE_BYTES))


def parse_weights(data: bytes, name: str) -> Weights:
    """``data`` as weights; ``name`` is what messages call it. Raises InvalidConfig, naming the place in it."""
    try:
        weights = msgspec.json.decode(data, type=Weights)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidConfig("weights", name, f"it must be a file of weights by feature: {error}") from error
    types = len(weights.task_types)
    for number, task_type in enumerate(weights.task_types):
        if task_type == UNKNOWN and (number < types - 1 or types < 3):
            what = "it stands for texts that ask for nothing, last and behind two types at least"
            raise _at(name, f"$.task_types[{number}]", task_type, what)
        if task_type in weights.task_types[:number]:
            raise _at(name, f"$.task_types[{number}]", task_type, "each name stands once")
    if len(weights.bias) != types:
        raise _at(name, "$.bias", len(weights.bias), f"one number for each of the {types} columns")
    for feature, steps in weights.weights.items():
        if len(steps) != types:
            raise _at(name, f"$.weights[{feature!r}]", len(steps), f"one number for each of the {types} columns")
    return weights


def dump_weights(weights: Weights) -> bytes:
    """As JSON with a line for each feature, so that two versions can be compared."""
    head: Mapping[str, Any] = {
        field: value for field, value in msgspec.to_builtins(weights).items() if field != "weights"
    }
    lines = [
        f" {msgspec.json.encode(feature).decode()}: {msgspec.json.encode(steps).decode()}"
        for feature, steps in sorted(weights.weights.items())
    ]
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode()
    return (text.removesuffix("\n}") + ',\n "weights": {\n ' + ",\n ".join(lines) + "\n }\n}\n").encode()


def _at(name: str, place: str, value: object, allowed: str) -> InvalidConfig:
    return InvalidConfig(f"weights ({name}), at {place}", value, allowed)
