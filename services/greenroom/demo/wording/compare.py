"""Comparisons by a number, and of what two things or people have."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo import words as w
from greenroom.demo.wording.base import Draft, cap, content_key


@dataclass(frozen=True)
class _Scale:
    """Things with a number from 2 to 9, and the words for less and more: of two, of three."""

    things: w.Words
    tells: tuple[str, ...]
    low: tuple[str, str]
    high: tuple[str, str]
    same: str


_SCALES: Final[dict[str, _Scale]] = {
    "price": _Scale(
        w.OBJECTS,
        ("the {t} costs {v} euros", "the price of the {t} is {v} euros"),
        ("cheaper", "the cheapest"),
        ("more expensive", "the most expensive"),
        "They cost the same.",
    ),
    "weight": _Scale(
        w.OBJECTS,
        ("the {t} weighs {v} kilos", "the weight of the {t} is {v} kilos"),
        ("lighter", "the lightest"),
        ("heavier", "the heaviest"),
        "They weigh the same.",
    ),
    "length": _Scale(
        w.VEHICLES,
        ("the {t} is {v} metres long", "the length of the {t} is {v} metres"),
        ("shorter", "the shortest"),
        ("longer", "the longest"),
        "They are equally long.",
    ),
    "age": _Scale(
        w.NAMES,
        ("{t} is {v} years old", "{t} is now {v} years of age"),
        ("younger", "the youngest"),
        ("older", "the oldest"),
        "They are equally old.",
    ),
}


@dataclass(frozen=True)
class _Trait:
    """Something that two can share."""

    things: w.Words
    values: w.Words
    tell: str
    ask: str
    same: str


_TRAITS: Final[dict[str, _Trait]] = {
    "colour": _Trait(
        tuple(f"the {thing}" for thing in w.OBJECTS),
        w.COLOURS,
        "{t} is {v}",
        "Do {a} and {b} have the same colour?",
        "Yes, both are {v}.",
    ),
    "city": _Trait(
        w.NAMES, w.CITIES, "{t} lives in {v}", "Do {a} and {b} live in the same city?", "Yes, both live in {v}."
    ),
    "drink": _Trait(w.NAMES, w.DRINKS, "{t} drinks {v}", "Do {a} and {b} drink the same?", "Yes, both drink {v}."),
}
_ASKS: Final = ("{f}. {q}", "Compare: {f}. {q}", "{q} {f}.", "Please compare. {f}. {q}", "Note that {lf}. {q}")


def compare(rng: Random) -> Draft:
    """Which of two or three is more or less by a number from 2 to 9, or whether two share a trait."""
    return _trait(rng) if rng.random() < 0.35 else _scale(rng)


def _scale(rng: Random) -> Draft:
    kind = rng.choice(sorted(_SCALES))
    scale, count = _SCALES[kind], 3 if rng.random() < 0.1 else 2
    values = rng.sample(range(2, 10), count)
    if count == 2 and rng.random() < 0.15:
        values[1] = values[0]
    things = [thing if kind == "age" else _tinted(rng, thing) for thing in rng.sample(scale.things, count)]
    high = rng.random() < 0.5
    word = (scale.high if high else scale.low)[count - 2]
    told = [rng.choice(scale.tells).format(t=t, v=v) for t, v in zip(things, values, strict=True)]
    joined = rng.choice((" and ", ", ", ", but " if values[0] != values[-1] else " and ")).join(told)
    winner = things[values.index((max if high else min)(values))]
    subject = winner if kind == "age" else f"the {winner}"
    answer = scale.same if len(set(values)) == 1 else f"{cap(subject)} is {word}."
    verb = "Who" if kind == "age" else rng.choice(("Which", "Which one"))
    facts = {thing: str(value) for thing, value in zip(things, values, strict=True)} | {"word": word}
    key = content_key(kind, *sorted(f"{t}={v}" for t, v in zip(things, values, strict=True)))
    prompt = rng.choice(_ASKS).format(f=cap(joined), lf=joined, q=f"{verb} is {word}?")
    return Draft(kind, key, facts, prompt, answer)


def _tinted(rng: Random, thing: str) -> str:
    return f"{rng.choice(w.COLOURS)} {thing}" if rng.random() < 0.2 else thing


def _trait(rng: Random) -> Draft:
    kind = rng.choice(sorted(_TRAITS))
    trait = _TRAITS[kind]
    one, two = rng.sample(trait.things, 2)
    first, second = rng.sample(trait.values, 2)
    if rng.random() < 0.5:
        second = first
    told = " and ".join(trait.tell.format(t=t, v=v) for t, v in ((one, first), (two, second)))
    answer = trait.same.format(v=first) if first == second else f"No, {told}."
    key = content_key(kind, *sorted((f"{one}={first}", f"{two}={second}")))
    prompt = rng.choice(_ASKS).format(f=cap(told), lf=told, q=trait.ask.format(a=one, b=two))
    return Draft(kind, key, {one: first, two: second}, prompt, answer)
