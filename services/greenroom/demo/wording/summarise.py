"""Notes and their one-line summaries."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final

from greenroom.demo.wording import words as w
from greenroom.demo.wording.base import Draft, cap, content_key, two_digits

_ASIDES: Final = (
    "The room was a little cold.",
    "Everybody had enough time to talk.",
    "Nobody was late.",
    "It was a busy day.",
    "A short break came in the middle.",
    "The photos will follow later.",
    "There was some music in the background.",
    "The mood was good from start to end.",
    "Most people had read the papers before.",
    "Some guests asked for more details.",
)
_SUMMARY_ASKS: Final = (
    "Summarise this in one line: {}",
    "Summarise the following note. {}",
    "Please give me a one-line summary of this text: {}",
    "{} Summarise the text above in one line.",
    "Write a short summary of this report. {}",
    "Here is a note: {} What is the short version?",
)


def summarise(rng: Random) -> Draft:
    """A few sentences of facts, in any order and with asides between them, to one line of fixed form."""
    kind = rng.choice(("meeting", "match", "weather", "order", "trip"))
    facts, forms, answer = _SUMMARIES[kind](rng)
    sentences = [rng.choice(options) for options in forms]
    sentences += rng.sample(_ASIDES, rng.choice((0, 0, 1, 1, 2, 3)))
    rng.shuffle(sentences)
    prompt = rng.choice(_SUMMARY_ASKS).format(" ".join(sentences))
    return Draft(kind, content_key(kind, *facts.values()), facts, prompt, answer)


#: Facts, the sentences each with its wordings, the summary.
_Summary = tuple[dict[str, str], list[tuple[str, ...]], str]


def _meeting(rng: Random) -> _Summary:
    day, following = rng.sample(w.DAYS, 2)
    group, city, subject = rng.choice(w.GROUPS), rng.choice(w.CITIES), rng.choice(w.SUBJECTS)
    chair, hours = rng.choice(w.NAMES), rng.choice(w.COUNTS)
    facts = {"day": day, "following": following, "group": group, "city": city, "subject": subject}
    facts |= {"chair": chair, "hours": hours}
    sentences: list[tuple[str, ...]] = [
        (f"On {day} the {group} team met in {city}.", f"The {group} team came together in {city} on {day}."),
        (f"{chair} chaired the meeting.", f"The chair was {chair}.", f"{chair} led the discussion."),
        (f"They talked about the {subject} for {hours} hours.", f"For {hours} hours the {subject} was discussed."),
        (f"The next meeting is on {following}.", f"They will meet again on {following}."),
    ]
    return (
        facts,
        sentences,
        (f"Meeting: the {group} team, {day}, {city}; {chair} on the {subject}, {hours} hours; next on {following}."),
    )


def _match(rng: Random) -> _Summary:
    winner, loser = rng.sample(w.TEAMS, 2)
    low, high = sorted(rng.sample(range(10), 2))
    sport, city, day, best = (rng.choice(w.SPORTS), rng.choice(w.CITIES), rng.choice(w.DAYS), rng.choice(w.NAMES))
    facts = {"winner": winner, "loser": loser, "high": str(high), "low": str(low), "sport": sport}
    facts |= {"city": city, "day": day, "best": best}
    sentences: list[tuple[str, ...]] = [
        (f"The {winner} played the {loser} at {sport}.", f"It was a {sport} match of the {loser} and the {winner}."),
        (
            f"The {winner} won {high} to {low}.",
            f"The {loser} lost {low} to {high}.",
            f"With {high} to {low} the {winner} won.",
        ),
        (f"They played in {city} on {day}.", f"On {day} the hall in {city} was full."),
        (f"The best player was {best}.", f"{best} was named player of the day."),
    ]
    return (
        facts,
        sentences,
        (f"Match: the {winner} beat the {loser} {high} to {low} at {sport}, {day}, {city}; best player {best}."),
    )


def _weather(rng: Random) -> _Summary:
    city, day, wind = rng.choice(w.CITIES), rng.choice(w.DAYS), rng.choice(w.WINDS)
    first, second = rng.sample(w.WEATHERS, 2)
    degrees = str(rng.randint(10, 35))
    facts = {"city": city, "day": day, "wind": wind, "first": first, "second": second, "degrees": degrees}
    sentences: list[tuple[str, ...]] = [
        (f"On {day} people in {city} wake up to {first}.", f"In {city} the {day} morning brings {first}."),
        (f"In the evening expect {second}.", f"Later in the day there will be {second}."),
        (f"The wind blows from the {wind}.", f"A wind comes from the {wind}."),
        (f"It gets as warm as {degrees} degrees.", f"The highest temperature is {degrees} degrees."),
    ]
    return facts, sentences, f"Weather: {city}, {day}, {first}, then {second}; wind from the {wind}, {degrees} degrees."


def _order(rng: Random) -> _Summary:
    buyer, count, goods = rng.choice(w.NAMES), rng.choice(w.COUNTS), rng.choice(w.GOODS)
    colour, day, place, price = (
        rng.choice(w.COLOURS),
        rng.choice(w.DAYS),
        rng.choice(w.SHOP_PLACES),
        str(two_digits(rng)),
    )
    facts = {
        "buyer": buyer,
        "count": count,
        "goods": goods,
        "colour": colour,
        "day": day,
        "place": place,
        "price": price,
    }
    sentences: list[tuple[str, ...]] = [
        (f"{buyer} ordered {count} {goods}.", f"An order of {count} {goods} came in from {buyer}."),
        (f"The box should be {colour}.", f"It has to be packed in {colour} paper."),
        (f"The parcel goes to the {place} on {day}.", f"On {day} it must be at the {place}."),
        (f"The bill is {price} euros.", f"In total that makes {price} euros."),
    ]
    return facts, sentences, (f"Order: {count} {goods} for {buyer}, packed in {colour}, {place}, {day}, {price} euros.")


def _trip(rng: Random) -> _Summary:
    start, end = rng.sample(w.CITIES, 2)
    first, second = rng.sample(w.NAMES, 2)
    how, sight, nights, day = rng.choice(w.TRANSPORTS), rng.choice(w.SIGHTS), rng.choice(w.COUNTS), rng.choice(w.DAYS)
    facts = {"start": start, "end": end, "first": first, "second": second, "how": how, "sight": sight}
    facts |= {"nights": nights, "day": day}
    sentences: list[tuple[str, ...]] = [
        (f"{first} and {second} travel from {start} to {end}.", f"From {start} {first} goes to {end} with {second}."),
        (f"They go {how} and leave on {day}.", f"On {day} they set off {how}."),
        (f"They stay for {nights} nights.", f"The hotel is booked for {nights} nights."),
        (f"They want to see {sight}.", f"{cap(sight)} is on their list."),
    ]
    return (
        facts,
        sentences,
        (f"Trip: {first} and {second}, {start} to {end} {how}, {day}, {nights} nights; to see {sight}."),
    )


_SUMMARIES: Final[dict[str, Callable[[Random], _Summary]]] = {
    "meeting": _meeting,
    "match": _match,
    "weather": _weather,
    "order": _order,
    "trip": _trip,
}
