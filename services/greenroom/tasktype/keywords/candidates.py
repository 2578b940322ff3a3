"""Labelled prompts as words, and the phrases in them that could become keywords."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.tasktype.evaluate import LabelledPrompt
from greenroom.tasktype.keywords.profile import LookAt
from greenroom.tasktype.words import bounded, words

Ints = NDArray[np.int64]
Phrase = tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Where each phrase that could become a keyword begins.

    ``phrases[c]`` has ``length[c]`` words and begins at the places ``at[first[c]:first[c + 1]]``; ``of`` is the
    candidate of each of these. A place is a word of a prompt that is looked at: ``prompt_at[place]`` is which.
    """

    phrases: tuple[Phrase, ...]
    length: Ints
    of: Ints
    at: Ints
    first: Ints
    prompt_at: Ints
    prompts: int

    @property
    def places(self) -> int:
        return len(self.prompt_at)


class Phrases:
    """All phrases of up to ``most_words`` words in what is looked at of the prompts, and those of ``also``."""

    def __init__(
        self, prompts: Sequence[LabelledPrompt], look_at: LookAt, *, most_words: int, also: Collection[Phrase] = ()
    ) -> None:
        self._prompts = len(prompts)
        known: dict[str, int] = {}
        here: list[int] = []
        prompt_at: list[int] = []
        part_at: list[int] = []
        part = 0
        for number, prompt in enumerate(prompts):
            for text in bounded(prompt.prompt, look_at.head_chars, look_at.tail_chars):
                found = [known.setdefault(word, len(known)) for word in words(text)]
                here += found
                prompt_at += [number] * len(found)
                part_at += [part] * len(found)
                part += 1
        self._words = list(known)
        self._known = known
        self._here = np.array(here, dtype=np.int64)
        self._prompt_at = np.array(prompt_at, dtype=np.int64)
        self._part_at = np.array(part_at, dtype=np.int64)
        self._most_words = most_words
        self._also = set(also)

    def candidates(self, wording: Ints, least_wordings: int) -> Candidates:
        """Those that occur in at least so many wordings (``wording[prompt]``), and those of ``also`` that occur."""
        phrases: list[Phrase] = []
        of: list[Ints] = []
        at: list[Ints] = []
        wordings = int(wording.max(initial=0)) + 1
        places = np.arange(len(self._here))
        names = self._here.copy()
        numbers = {phrase: self._known.get(phrase[0], -1) for phrase in self._also}
        for length in range(1, max(self._most_words, *map(len, self._also), 1) + 1):
            if length > 1:
                places, names, numbers = self._longer(places, names, numbers, length)
            if not len(places):
                break
            each = np.unique(names * wordings + wording[self._prompt_at[places]])
            seen = np.bincount(each // wordings, minlength=names.max() + 1)
            good = (seen >= least_wordings) & (length <= self._most_words)
            good[[number for phrase, number in numbers.items() if len(phrase) == length and number >= 0]] = True
            place_of = np.zeros(len(good), dtype=np.int64)
            place_of[names] = places
            number_of = np.cumsum(good) - 1 + len(phrases)
            taken = good[names]
            of.append(number_of[names[taken]])
            at.append(places[taken])
            phrases += [tuple(self._words[word] for word in self._here[p : p + length]) for p in place_of[good]]
        all_of, all_at = (np.concatenate([np.zeros(0, dtype=np.int64), *parts]) for parts in (of, at))
        order = np.argsort(all_of, kind="stable")
        return Candidates(
            phrases=tuple(phrases),
            length=np.array([len(phrase) for phrase in phrases], dtype=np.int64),
            of=all_of[order],
            at=all_at[order],
            first=np.searchsorted(all_of[order], np.arange(len(phrases) + 1)),
            prompt_at=self._prompt_at,
            prompts=self._prompts,
        )

    def _longer(
        self, places: Ints, names: Ints, numbers: dict[Phrase, int], length: int
    ) -> tuple[Ints, Ints, dict[Phrase, int]]:
        """From the names of phrases of one word less to those of ``length`` words, and where they begin."""
        whole = places + length - 1 < len(self._here)
        whole[whole] = self._part_at[places[whole] + length - 1] == self._part_at[places[whole]]
        places, names = places[whole], names[whole]
        keys, named = np.unique(names * len(self._words) + self._here[places + length - 1], return_inverse=True)
        longer: dict[Phrase, int] = {}
        for phrase, number in numbers.items():
            last = self._known.get(phrase[length - 1], -1) if len(phrase) >= length else -1
            if number >= 0 and last >= 0:
                key = number * len(self._words) + last
                found = int(np.searchsorted(keys, key))
                longer[phrase] = found if found < len(keys) and keys[found] == key else -1
        return places, named.astype(np.int64), longer
