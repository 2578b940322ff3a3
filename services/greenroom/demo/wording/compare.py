"""Two things compared on a scale, or by whether they share a trait: the two values first, then the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo.wording import words as w
from greenroom.demo.wording.base import Draft, cap, content_key


@dataclass(frozen=True)
class _Scale:
    """Things on a scale whose levels go from least to most."""

    things: w.Words
    levels: w.Words
    tells: tuple[str, ...]
    less: str
    more: str


_ARTICLE_OBJECTS: Final = tuple(f"the {thing}" for thing in w.OBJECTS)
_ARTICLE_VEHICLES: Final = tuple(f"the {thing}" for thing in w.VEHICLES)
_SCALES: Final[dict[str, _Scale]] = {
    "size": _Scale(_ARTICLE_OBJECTS, w.SIZES, ("{t} is {v}", "{t} looks {v}"), "smaller", "larger"),
    "speed": _Scale(_ARTICLE_VEHICLES, w.SPEEDS, ("{t} is {v}", "{t} seems {v}"), "slower", "faster"),
    "price": _Scale(
        _ARTICLE_OBJECTS,
        w.COUNTS,
        ("{t} costs {v} euros", "the price of {t} is {v} euros"),
        "cheaper",
        "dearer",
    ),
    "age": _Scale(w.NAMES, w.COUNTS, ("{t} is {v} years old", "{t} is now {v}"), "younger", "older"),
    "weight": _Scale(
        _ARTICLE_OBJECTS,
        w.COUNTS,
        ("{t} weighs {v} kilos", "the weight of {t} is {v} kilos"),
        "lighter",
        "heavier",
    ),
}


@dataclass(frozen=True)
class _Trait:
    """Something that two can share."""

    things: w.Words
    values: w.Words
    tells: tuple[str, ...]
    ask: str


_TRAITS: Final[dict[str, _Trait]] = {
    "colour": _Trait(
        _ARTICLE_OBJECTS, w.COLOURS, ("{t} is {v}", "{t} looks {v}"), "Do {a} and {b} have the same colour?"
    ),
    "city": _Trait(w.NAMES, w.CITIES, ("{t} lives in {v}",), "Do {a} and {b} live in the same city?"),
    "hobby": _Trait(w.NAMES, w.HOBBIES, ("{t} loves {v}", "{t} enjoys {v}"), "Do {a} and {b} have the same hobby?"),
}
_ASKS: Final = ("{f}. {q}", "Compare: {f}. {q}", "{q} {f}.", "Please compare. {f}. {q}", "Note that {lf}. {q}")


def compare(rng: Random) -> Draft:
    """Is one more or less than the other, or do both share a trait; the first one that is asked about comes first."""
    kind = rng.choice(sorted(_SCALES) if rng.random() < 0.6 else sorted(_TRAITS))
    return _scale(rng, kind) if kind in _SCALES else _trait(rng, kind)


def _told(rng: Random, tells: tuple[str, ...], things: list[str], values: list[str]) -> str:
    clauses = [rng.choice(tells).format(t=t, v=v) for t, v in zip(things, values, strict=True)]
    rng.shuffle(clauses)
    return rng.choice((" and ", ", ", ", while ")).join(clauses)


def _draft(rng: Random, kind: str, things: list[str], values: list[str], told: str, ask: str, answer: str) -> Draft:
    pairs = dict(zip(things, values, strict=True))
    key = content_key(kind, *sorted(f"{thing}={value}" for thing, value in pairs.items()))
    prompt = rng.choice(_ASKS).format(f=cap(told), lf=told, q=ask)
    return Draft(kind, key, pairs, prompt, answer)


def _scale(rng: Random, kind: str) -> Draft:
    scale = _SCALES[kind]
    things = rng.sample(scale.things, 2)
    first, second = rng.sample(range(len(scale.levels)), 2)
    if rng.random() < 0.2:
        second = first
    verdict = "equal" if first == second else scale.less if first < second else scale.more
    values = [scale.levels[first], scale.levels[second]]
    words = rng.sample((scale.less, scale.more), 2)
    ask = f"Is {things[0]} {words[0]} or {words[1]} than {things[1]}?"
    answer = f"I read {values[0]} against {values[1]}: {verdict}."
    return _draft(rng, kind, things, values, _told(rng, scale.tells, things, values), ask, answer)


def _trait(rng: Random, kind: str) -> Draft:
    trait = _TRAITS[kind]
    things = rng.sample(trait.things, 2)
    first, second = rng.sample(trait.values, 2)
    if rng.random() < 0.5:
        second = first
    values = [first, second]
    ask = trait.ask.format(a=things[0], b=things[1])
    answer = f"I read {first} and {second}: {'the same' if first == second else 'different'}."
    return _draft(rng, kind, things, values, _told(rng, trait.tells, things, values), ask, answer)
