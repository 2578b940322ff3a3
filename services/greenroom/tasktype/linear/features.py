"""What of a prompt a linear head weighs: above all its instruction, which stands in its first or its last sentence.

Data sets differ in what their texts are about, and clients in how they word a wish. So the features favour words of the
wish: n-grams of the first and of the last sentence count much, words between them little, and the shipped keywords
count as classes of synonyms.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from greenroom.tasktype.words import bounded

HEAD_CHARS: Final = 500
TAIL_CHARS: Final = 400
_MOST_TOKENS: Final = 40
"""Of a sentence that are looked at."""
_LEAST_TOKENS: Final = 4
"""A first or last sentence with fewer is taken together with its neighbour: ``Answer:`` alone says little."""
_STEM: Final = 5
"""Characters that words of one stem share: summarise, summary, summarizing."""
_CHARACTERS: Final = (3, 4, 5)

_TOKEN = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|\d+|[?:!|\"_]")
_SENTENCE_END = re.compile(r"\n+|(?<=[.!?:])[\"')]?\s+")
_OPTIONS = re.compile(r"^\s*[-*]?\s*\(?[A-Da-d1-4][).:]\s|\([A-D]\)", re.MULTILINE)
_PAIR = re.compile(r"\b(sentence|question|text|statement|review|article|passage)\s*_?[12ab]\b", re.IGNORECASE)
_CODE = re.compile(r"```|[{};]\s*\n|\bdef \w+\(|</\w+>|=>")
_SPEAKER = re.compile(r"^[A-Z][\w ]{0,15}: ", re.MULTILINE)
_ASKING: Final = frozenset({"what", "who", "whom", "whose", "when", "where", "why", "which", "how"})
_VERB_FIRST: Final = frozenset(
    {"is", "are", "was", "were", "do", "does", "did", "can", "could", "would", "will", "should", "has", "have", "had"}
) | {"may", "might"}


@dataclass(frozen=True, slots=True)
class Blocks:
    """How much each kind of feature counts: its share of a prompt's squared length, kinds being of unit length.

    ``first``, ``last``: n-grams of one to three words of the first and the last sentence. ``either``: those of up to
    two words, of both. ``rest``: words between. ``stems``: beginnings of words of either. ``characters``: n-grams of
    characters of either. ``keywords``: how many of the shipped keywords of each type stand where, as logarithms (not
    of unit length). ``shape``: what the prompt looks like.
    """

    first: float = 1.0
    last: float = 1.0
    either: float = 0.5
    rest: float = 0.2
    stems: float = 0.6
    characters: float = 1.0
    keywords: float = 0.6
    shape: float = 0.1


class PromptFeatures(Protocol):
    """Makes features of prompts. Features are named, so that weights can be read and looked up by people.

    ``name``: what weights say that they are for. It changes whenever the features do.
    """

    name: str

    def __call__(self, prompt: str) -> dict[str, float]:
        """By name. Takes bounded time however long the prompt is."""
        ...


class InstructionFeatures:
    """Words and forms of the first and the last sentence above all, and the shipped keywords as classes."""

    name = "instruction-1"

    def __init__(self, blocks: Blocks = Blocks()) -> None:
        self._keywords = KeywordExtractor(load_profile())
        self._blocks = blocks

    def __call__(self, prompt: str) -> dict[str, float]:
        """Only the beginning and the end of a prompt are looked at."""
        parts = [_sentences(part) for part in bounded(prompt.strip(), HEAD_CHARS, TAIL_CHARS)]
        beginning, end = parts[0], parts[-1]
        first = _joined(beginning)[:_MOST_TOKENS]
        last = _joined(end[::-1], backwards=True)[-_MOST_TOKENS:]
        between = beginning[1:-1] if len(parts) == 1 else beginning[1:] + end[:-1]
        rest = [token for sentence in between for token in sentence]
        blocks = self._blocks
        found: dict[str, float] = {}
        _add(found, "f ", _grams(first, 3) | _beginnings(first), blocks.first)
        _add(found, "l ", _grams(last, 3) | _beginnings(last) | _ends(last), blocks.last)
        _add(found, "e ", _grams(first, 2) | _grams(last, 2), blocks.either)
        _add(found, "r ", set(rest), blocks.rest)
        words = {*first, *last}
        _add(found, "s ", {word[:_STEM] for word in words if len(word) > _STEM}, blocks.stems)
        _add(found, "c ", set(_characters(words)) if blocks.characters else set(), blocks.characters)
        _add(found, "p ", _shape(prompt, first, last, rest), blocks.shape)
        if blocks.keywords:
            for place, tokens in (("f", first), ("l", last), ("r", rest)):
                for name, count in self._matches(tokens).items():
                    found[f"k {place} {name}"] = math.log1p(count) * math.sqrt(blocks.keywords)
        return found

    def _matches(self, tokens: Iterable[str]) -> Counter[str]:
        words = [word for token in tokens for word in token.split("'")]
        return Counter(self._keywords.names[number] for types in self._keywords.matches(words) for number in types)


def _sentences(text: str) -> list[list[str]]:
    """The tokens of each sentence or line that has any: words, ``0`` for numbers, and marks that tell forms apart."""
    folded = unicodedata.normalize("NFKC", text).casefold().replace("’", "'")
    found = [_TOKEN.findall(sentence) for sentence in _SENTENCE_END.split(folded)]
    return [["0" if token.isdigit() else token for token in tokens] for tokens in found if tokens]


def _joined(sentences: Sequence[list[str]], *, backwards: bool = False) -> list[str]:
    """The first sentence, with those behind it as long as it is too short. ``backwards``: they stand before it."""
    tokens: list[str] = []
    for sentence in sentences:
        tokens = sentence + tokens if backwards else tokens + sentence
        if len(tokens) >= _LEAST_TOKENS:
            break
    return tokens


def _grams(tokens: Sequence[str], longest: int) -> set[str]:
    return {
        " ".join(tokens[start : start + length])
        for length in range(1, longest + 1)
        for start in range(len(tokens) - length + 1)
    }


def _beginnings(tokens: Sequence[str]) -> set[str]:
    return {"^ " + " ".join(tokens[:length]) for length in (1, 2, 3) if len(tokens) >= length}


def _ends(tokens: Sequence[str]) -> set[str]:
    return {" ".join(tokens[-length:]) + " $" for length in (1, 2, 3) if len(tokens) >= length}


def _characters(words: Iterable[str]) -> Iterable[str]:
    for word in words:
        marked = f"<{word}>"
        for length in _CHARACTERS:
            for start in range(len(marked) - length + 1):
                yield marked[start : start + length]


def _shape(prompt: str, first: Sequence[str], last: Sequence[str], rest: Sequence[str]) -> set[str]:
    looked_at = "\n".join(bounded(prompt.strip(), HEAD_CHARS, TAIL_CHARS))
    found = {f"length {min(12, len(prompt).bit_length())}"}
    if not looked_at:
        return found
    for place, tokens in (("first", first), ("last", last)):
        if "?" in tokens:
            found.add(f"{place} asks")
        if tokens and tokens[0] in _ASKING:
            found.add(f"{place} begins with a question word")
        elif tokens and tokens[0] in _VERB_FIRST:
            found.add(f"{place} begins with a verb")
        elif "?" in tokens and not _ASKING.isdisjoint(tokens):
            found.add(f"{place} has a question word")
    if "?" in rest:
        found.add("the rest asks")
    for name, pattern in (("options", _OPTIONS), ("a pair", _PAIR), ("code", _CODE)):
        if pattern.search(looked_at):
            found.add(name)
    if len(_SPEAKER.findall(looked_at)) >= 3:
        found.add("speakers")
    if looked_at.endswith(":"):
        found.add("ends with a colon")
    return found


def _add(found: dict[str, float], mark: str, names: set[str], share: float) -> None:
    if share > 0 and names:
        value = math.sqrt(share / len(names))
        for name in names:
            found[mark + name] = value
