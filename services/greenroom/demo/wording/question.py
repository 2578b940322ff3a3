"""Passages about people, and questions answered by a span of them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo.wording import words as w
from greenroom.demo.wording.base import Draft, content_key


@dataclass(frozen=True)
class _Attribute:
    values: w.Words
    tells: tuple[str, ...]
    asks: tuple[str, ...]
    answer: str


_ATTRIBUTES: Final[dict[str, _Attribute]] = {
    "city": _Attribute(
        w.CITIES,
        ("{n} lives in {v}.", "The home of {n} is in {v}."),
        ("Where does {n} live?", "In which city does {n} live?"),
        "{n} lives in {v}.",
    ),
    "job": _Attribute(
        w.JOBS,
        ("{n} is a {v}.", "{n} became a {v}."),
        ("What is the job of {n}?", "What does {n} do for a living?"),
        "{n} is a {v}.",
    ),
    "pet": _Attribute(
        w.PETS,
        ("{n} has a {v}.", "{n} keeps a {v} at home."),
        ("Which pet does {n} have?", "What animal does {n} keep?"),
        "{n} has a {v}.",
    ),
    "hobby": _Attribute(
        w.HOBBIES,
        ("{n} loves {v}.", "In the holidays {n} enjoys {v}."),
        ("What is the hobby of {n}?", "What does {n} love?"),
        "{n} loves {v}.",
    ),
    "drink": _Attribute(
        w.DRINKS,
        ("{n} drinks {v}.", "{n} always asks for {v}."),
        ("What does {n} drink?", "Which drink does {n} ask for?"),
        "{n} drinks {v}.",
    ),
    "instrument": _Attribute(
        w.INSTRUMENTS,
        ("{n} plays the {v}.", "{n} practises the {v} every day."),
        ("Which instrument does {n} play?", "What does {n} play?"),
        "{n} plays the {v}.",
    ),
    "day": _Attribute(
        w.DAYS,
        ("{n} arrives on {v}.", "{n} comes on {v}."),
        ("When does {n} arrive?", "On which day does {n} come?"),
        "{n} arrives on {v}.",
    ),
}
_PASSAGE_ASKS: Final = (
    "Read this: {p} {q}",
    "{p} {q}",
    "{q} {p}",
    "Answer from the text. {p} {q}",
    "Text: {p} Question: {q}",
    "I have a question about this passage. {p} {q}",
)


def question(rng: Random) -> Draft:
    """A passage about two to four people and an answer copied out of it; other people share the attribute."""
    people = rng.sample(w.NAMES, rng.choice((2, 2, 3, 3, 4)))
    asked = rng.choice(people)
    attributes = rng.sample(sorted(_ATTRIBUTES), rng.choice((1, 2, 2, 3)))
    attribute = rng.choice(attributes)
    facts: dict[str, str] = {}
    for about in attributes:
        values = rng.sample(_ATTRIBUTES[about].values, len(people))
        for name, value in zip(people, values, strict=True):
            if about == attribute or rng.random() < 0.6:
                facts[f"{name}.{about}"] = value
    order = list(facts)
    rng.shuffle(order)
    sentences = []
    for entry in order:
        name, about = entry.split(".")
        sentences.append(rng.choice(_ATTRIBUTES[about].tells).format(n=name, v=facts[entry]))
    passage, form = " ".join(sentences), _ATTRIBUTES[attribute]
    prompt = rng.choice(_PASSAGE_ASKS).format(p=passage, q=rng.choice(form.asks).format(n=asked))
    value = facts[f"{asked}.{attribute}"]
    return Draft(attribute, content_key(asked, attribute, value), facts, prompt, form.answer.format(n=asked, v=value))
