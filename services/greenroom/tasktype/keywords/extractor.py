"""What kind of task a prompt describes, by profiled keywords: eMoE, section 3.2.1."""

from __future__ import annotations

from dataclasses import dataclass, field

from greenroom.tasktype.extractor import UNKNOWN, Extraction
from greenroom.tasktype.keywords.profile import Profile
from greenroom.tasktype.words import bounded, words


@dataclass(slots=True)
class _Node:
    """A place in the tree of all keywords. ``types``: those for which a keyword ends here."""

    next: dict[str, _Node] = field(default_factory=dict)
    types: tuple[int, ...] = ()


class KeywordExtractor:
    """Holds the keywords of a profile as one tree, walked once for each prompt.

    At every word the longest keyword that begins there is taken, and the search goes on behind it: inside "answer
    the following question" no other "question" is found. Each one taken counts one for every type that lists it.
    The type with the most matches is the answer; where types tie, the one of them that the profile lists first. So
    the same prompt and profile give the same answer, always.

    A prompt's words are looked at between ``head_chars`` from its beginning and ``tail_chars`` from its end, so the
    time for a prompt is bounded however long it is. An extraction's scores are the matches.
    """

    name = "keywords"

    def __init__(self, profile: Profile) -> None:
        self.names = profile.names
        self._look_at = profile.look_at
        self._root = _Node()
        for number, task in enumerate(profile.task_types):
            for keyword in task.keywords:
                node = self._root
                for word in words(keyword):
                    node = node.next.setdefault(word, _Node())
                node.types = (*node.types, number)

    def extract(self, prompt: str) -> Extraction:
        matches = [0] * len(self.names)
        for part in bounded(prompt, self._look_at.head_chars, self._look_at.tail_chars):
            for types in self.matches(words(part)):
                for number in types:
                    matches[number] += 1
        best = max(range(len(self.names)), key=lambda number: (matches[number], -number))
        return Extraction(
            task_type=self.names[best] if matches[best] else UNKNOWN,
            scores={name: count for name, count in zip(self.names, matches, strict=True) if count},
        )

    def matches(self, text: list[str]) -> list[tuple[int, ...]]:
        """The types of each keyword in folded words, from left to right, the longest first, none overlapping."""
        found: list[tuple[int, ...]] = []
        start = 0
        while start < len(text):
            node, length = self._root, 0
            types: tuple[int, ...] = ()
            for end in range(start, len(text)):
                following = node.next.get(text[end])
                if following is None:
                    break
                node = following
                if node.types:
                    length, types = end - start + 1, node.types
            if types:
                found.append(types)
            start += max(1, length)
        return found
