"""Comparisons by a word or a number, and of what two things or people have."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo import words as w
from greenroom.demo.wording.base import Draft, cap, content_key


@dataclass(frozen=True)
class _Scale:
    """Things on a scale, and the words for less and more: of two, of three."""

    things: w.Words
    levels: w.Words
    tells: tuple[str, ...]
    low: tuple[str, str]
    high: tuple[str, str]
    same: str


_NUMBERS: Final = tuple(str(number) for number in range(2, 10))
_SCALES: Final[dict[str, _Scale]] = {
    "size": _Scale(
        w.OBJECTS,
        w.SIZES,
        ("the {t} is {v}", "the {t} looks {v}"),
        ("smaller", "the smallest"),
        ("larger", "the largest"),
        "They are equally large.",
    ),
    "speed": _Scale(
        w.VEHICLES,
        w.SPEEDS,
        ("the {t} is {v}", "the {t} seems {v}"),
        ("slower", "the slowest"),
        ("faster", "the fastest"),
        "They are equally fast.",
    ),
    "generation": _Scale(
        w.NAMES,
        w.AGES,
        ("{t} is {v}", "{t} is now {v}"),
        ("younger", "the youngest"),
        ("older", "the oldest"),
        "They are equally old.",
    ),
    "price": _Scale(
        w.OBJECTS,
        _NUMBERS,
        ("the {t} costs {v} euros", "the price of the {t} is {v} euros"),
        ("cheaper", "the cheapest"),
        ("more expensive", "the most expensive"),
        "They cost the same.",
    ),
}
_WORDED: Final = ("size", "speed", "generation")


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
    "hobby": _Trait(w.NAMES, w.HOBBIES, "{t} loves {v}", "Do {a} and {b} have the same hobby?", "Yes, both love {v}."),
}
_ASKS: Final = ("{f}. {q}", "Compare: {f}. {q}", "{q} {f}.", "Please compare. {f}. {q}", "Note that {lf}. {q}")


def compare(rng: Random) -> Draft:
    """Which of two or three is more or less, by a word or by a number, or whether two share a trait."""
    chance = rng.random()
    if chance < 0.35:
        return _trait(rng)
    return _scale(rng, "price" if chance < 0.47 else rng.choice(_WORDED))


def _scale(rng: Random, kind: str) -> Draft:
    scale, count = _SCALES[kind], 3 if rng.random() < 0.1 else 2
    ranks = rng.sample(range(len(scale.levels)), count)
    if count == 2 and rng.random() < 0.15:
        ranks[1] = ranks[0]
    people = scale.things is w.NAMES
    things = [thing if people else _tinted(rng, thing) for thing in rng.sample(scale.things, count)]
    values = [scale.levels[rank] for rank in ranks]
    high = rng.random() < 0.5
    word = (scale.high if high else scale.low)[count - 2]
    told = [rng.choice(scale.tells).format(t=t, v=v) for t, v in zip(things, values, strict=True)]
    joined = rng.choice((" and ", ", ", ", but " if values[0] != values[-1] else " and ")).join(told)
    winner = things[ranks.index((max if high else min)(ranks))]
    subject = winner if people else f"the {winner}"
    answer = scale.same if len(set(ranks)) == 1 else f"{cap(subject)} is {word}."
    verb = "Who" if people else rng.choice(("Which", "Which one"))
    facts = dict(zip(things, values, strict=True)) | {"word": word}
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
