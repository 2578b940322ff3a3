"""Reviews with their sentiment, headlines with their topic."""

from __future__ import annotations

from random import Random
from typing import Final

from greenroom.demo.wording import words as w
from greenroom.demo.wording.base import Draft, cap, content_key

_SENTIMENT_ASKS: Final = (
    "Is this review positive, negative or mixed? {}",
    "Label the review as positive, negative or mixed: {}",
    "{} Is that positive, negative or mixed?",
    "Classify the sentiment of this review: {}",
    "What is the sentiment here? {}",
)
_TOPIC_ASKS: Final = (
    "What is the topic of this headline? {}",
    "Classify the headline by topic: {}",
    "{} Which topic is that?",
    "Name the topic of this news line: {}",
)
_TOPIC_TAILS: Final = ("", "", " on {day}", " in {city}", ", says {name}", ", {name} writes from {city}")


def classify(rng: Random) -> Draft:
    """A short review to its sentiment (negations turn a word over), or a headline to its topic."""
    return _sentiment(rng) if rng.random() < 0.7 else _topic(rng)


def _opinion(rng: Random, thing: str, positive: bool) -> str:
    if rng.random() < 0.35:
        word = rng.choice(w.BAD if positive else w.GOOD)
        return f"the {thing} was {rng.choice(('not', 'not at all', 'never', 'hardly'))} {word}"
    word = rng.choice(w.GOOD if positive else w.BAD)
    degree = f"{rng.choice(w.DEGREES)} " if rng.random() < 0.5 else ""
    return f"the {thing} was {degree}{word}"


def _sentiment(rng: Random) -> Draft:
    label = rng.choice(("positive", "negative", "mixed"))
    things = rng.sample(w.REVIEWED, rng.randint(2 if label == "mixed" else 1, 4))
    signs = [label == "positive"] * len(things)
    if label == "mixed":
        signs = [rng.random() < 0.5 for _ in things]
        signs[0] = not signs[1]
        rng.shuffle(signs)
    opinions = [_opinion(rng, thing, sign) for thing, sign in zip(things, signs, strict=True)]
    text = cap(opinions[0])
    for previous, sign, opinion in zip(signs, signs[1:], opinions[1:], strict=False):
        joints = (" and ", ", ", ". ") if sign == previous else (" but ", ", yet ", ". ")
        joint = rng.choice(joints)
        text += joint + (cap(opinion) if joint == ". " else opinion)
    facts = {"things": " ".join(things), "rule": "".join("+" if sign else "-" for sign in signs)}
    return Draft(
        "sentiment", content_key(*sorted(opinions)), facts, rng.choice(_SENTIMENT_ASKS).format(text + "."), label
    )


def _topic(rng: Random) -> Draft:
    topic = rng.choice(sorted(w.TOPICS))
    who, did, what = (rng.choice(options) for options in w.TOPICS[topic])
    tail = rng.choice(_TOPIC_TAILS).format(day=rng.choice(w.DAYS), city=rng.choice(w.CITIES), name=rng.choice(w.NAMES))
    facts = {"who": who, "did": did, "what": what}
    prompt = rng.choice(_TOPIC_ASKS).format(f"{who} {did} {what}{tail}.")
    return Draft("topic", content_key(who, did, what), facts, prompt, topic)
