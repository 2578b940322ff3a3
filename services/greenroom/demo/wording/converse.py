"""Requests and polite replies."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from greenroom.demo.wording import words as w
from greenroom.demo.wording.base import Draft, content_key


@dataclass(frozen=True)
class _Request:
    asks: tuple[str, ...]
    reply: str


_REQUESTS: Final[dict[str, _Request]] = {
    "table": _Request(
        ("Could you book a table for {count} on {day}?", "I need a table for {count} on {day}, please."),
        "Of course, I will book a table for {count} on {day}. Is there anything else that I can do for you?",
    ),
    "ticket": _Request(
        ("Can I get a ticket to {city} on {day}?", "Please sell me a ticket to {city} for {day}."),
        "With pleasure, here is your ticket to {city} for {day}. I wish you a pleasant journey.",
    ),
    "lost": _Request(
        ("I lost my {colour} {thing}.", "Have you seen my {colour} {thing}? I cannot find it."),
        "I am sorry to hear that. I will look for your {colour} {thing} and call you as soon as I find it.",
    ),
    "lesson": _Request(
        ("I would like to learn the {instrument}.", "Do you give lessons on the {instrument}?"),
        "That is a nice plan. Our lessons on the {instrument} begin next week, and you are very welcome.",
    ),
    "drink": _Request(
        ("May I have some {drink}?", "A cup of {drink}, please.", "I am thirsty, is there any {drink}?"),
        "Sure, your {drink} is on its way.",
    ),
    "move": _Request(
        ("I must move our meeting from {day} to {later}.", "Can we meet on {later} instead of {day}?"),
        "No problem, I have moved our meeting from {day} to {later}. See you then.",
    ),
    "thanks": _Request(
        ("Thank you for the {thing}.", "Many thanks for repairing my {thing}!"),
        "You are welcome. I hope that you enjoy the {thing}.",
    ),
    "complaint": _Request(
        ("The {thing} that I bought on {day} is broken.", "My new {thing} from {day} does not work."),
        "I am very sorry about the {thing}. Please bring it back, and you will get a new one or your money.",
    ),
}
_INTRODUCTIONS: Final = ("I am {name}.", "My name is {name}.", "This is {name}.", "{name} here.")
_CONVERSE_FORMS: Final = (
    "{hello} {intro} {ask}",
    "{hello} {ask} {intro}",
    "{hello} {intro} I hope you are well. {ask}",
)
_FORMAL: Final = {f"Good {part}": f"Good {part}" for part in w.DAY_PARTS}
_HELLOS: Final = _FORMAL | {"Hello": "Hello", "Hi": "Hello", "Hey there": "Hello"}


def converse(rng: Random) -> Draft:
    """A polite reply to somebody who greets, gives a name and wants something."""
    kind = rng.choice(sorted(_REQUESTS))
    request, name, hello = _REQUESTS[kind], rng.choice(w.NAMES), rng.choice(sorted(_HELLOS))
    day, later = rng.sample(w.DAYS, 2)
    slots = {
        "count": rng.choice(w.COUNTS),
        "day": day,
        "later": later,
        "city": rng.choice(w.CITIES),
        "colour": rng.choice(w.COLOURS),
        "thing": rng.choice(w.OBJECTS),
        "instrument": rng.choice(w.INSTRUMENTS),
        "drink": rng.choice(w.DRINKS),
    }
    ask = rng.choice(request.asks).format(**slots)
    used = {slot: value for slot, value in slots.items() if f"{{{slot}}}" in "".join(request.asks)}
    facts = {"hello": hello, "name": name, **used}
    prompt = rng.choice(_CONVERSE_FORMS).format(
        hello=hello + rng.choice((".", "!")),
        intro=rng.choice(_INTRODUCTIONS).format(name=name),
        ask=ask,
    )
    answer = f"{_HELLOS[hello]}, {name}! {request.reply.format(**slots)}"
    return Draft(kind, content_key(kind, name, *used.values()), facts, prompt, answer)
