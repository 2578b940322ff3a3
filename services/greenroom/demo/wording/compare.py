"""Comparisons by a number or a colour."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo import words as w
from greenroom.demo.wording.base import Draft, cap, content_key, two_digits


@dataclass(frozen=True)
class _Scale:
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
    "speed": _Scale(
        w.VEHICLES,
        ("the {t} drives at {v} kilometres an hour", "the {t} reaches {v} kilometres an hour"),
        ("slower", "the slowest"),
        ("faster", "the fastest"),
        "They are equally fast.",
    ),
    "age": _Scale(
        w.NAMES,
        ("{t} is {v} years old", "{t} is now {v} years of age"),
        ("younger", "the youngest"),
        ("older", "the oldest"),
        "They are equally old.",
    ),
}
_COMPARE_ASKS: Final = ("{f}. {q}", "Compare: {f}. {q}", "{q} {f}.", "Please compare. {f}. {q}", "Note that {lf}. {q}")


def compare(rng: Random) -> Draft:
    """Which of two or three is more by a two-digit number, or whether two things share a colour."""
    return _colours(rng) if rng.random() < 0.15 else _scales(rng)


def _scales(rng: Random) -> Draft:
    kind = rng.choice(sorted(_SCALES))
    scale, count = _SCALES[kind], 3 if rng.random() < 0.15 else 2
    first = two_digits(rng)
    values = [first]
    while len(values) < count:
        other = two_digits(rng)
        if rng.random() < 0.35:
            other = first - first % 10 + rng.randrange(10)  # the same tens: the units decide
        if count == 2 and rng.random() < 0.15:
            other = first
        if count == 2 or other not in values:
            values.append(other)
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
    prompt = rng.choice(_COMPARE_ASKS).format(f=cap(joined), lf=joined, q=f"{verb} is {word}?")
    return Draft(kind, key, facts, prompt, answer)


def _tinted(rng: Random, thing: str) -> str:
    return f"{rng.choice(w.COLOURS)} {thing}" if rng.random() < 0.3 else thing


def _colours(rng: Random) -> Draft:
    one, two = rng.sample(w.OBJECTS, 2)
    first = rng.choice(w.COLOURS)
    second = first if rng.random() < 0.5 else rng.choice(w.COLOURS)
    told = rng.choice(
        (f"the {one} is {first} and the {two} is {second}", f"I have a {first} {one} and a {second} {two}")
    )
    ask = rng.choice(
        (f"Do the {one} and the {two} have the same colour?", f"Are the {one} and the {two} of one colour?")
    )
    answer = f"Yes, both are {first}." if first == second else f"No, the {one} is {first} and the {two} is {second}."
    facts = {one: first, two: second}
    prompt = rng.choice(_COMPARE_ASKS).format(f=cap(told), lf=told, q=ask)
    return Draft("colour", content_key("colour", *sorted((f"{one}={first}", f"{two}={second}"))), facts, prompt, answer)
