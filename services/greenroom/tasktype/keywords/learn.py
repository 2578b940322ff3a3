"""Keywords by task type from labelled prompts: the profile that eMoE, section 3.2.1, looks its keywords up in."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype.evaluate import Evaluation, LabelledPrompt, evaluate
from greenroom.tasktype.extractor import UNKNOWN
from greenroom.tasktype.keywords.candidates import Ints, Phrase, Phrases
from greenroom.tasktype.keywords.extractor import KeywordExtractor
from greenroom.tasktype.keywords.profile import LookAt, Profile, TypeKeywords
from greenroom.tasktype.keywords.selection import Flags, Selection
from greenroom.tasktype.words import words

_PRICE = 1.0
"""What a keyword must earn (see Selection): a prompt that was a toss-up of five types and is certain now earns 1.6."""
_LONGEST_NAME = 64
_SIZES = (0, 10, 20, 30, 50, 75, 100, 150, 200, 300, 400, 600, 800, 1000)


@dataclass(frozen=True, slots=True)
class LearnConfig:
    """``held_out``: share of each type's prompts that nothing is learnt from. ``folds``: parts of the others, each in
    turn put aside to find how many keywords are worth having. A keyword has at most ``most_words`` words and was seen
    in at least ``least_wordings`` wordings, and in one of a thousand. ``most_keywords`` of all types together;
    ``most_prompts`` are learnt from."""

    held_out: float = 0.2
    folds: int = 4
    most_keywords: int = 400
    most_words: int = 3
    least_wordings: int = 3
    most_prompts: int = 10_000

    def __post_init__(self) -> None:
        if not 0 <= self.held_out <= 0.9:
            raise InvalidConfig("held_out", self.held_out, "a share from 0 to 0.9")
        for name, least, most in (
            ("folds", 2, 20),
            ("most_keywords", 1, 100_000),
            ("most_words", 1, 16),
            ("least_wordings", 1, 1_000_000),
            ("most_prompts", 2, 1_000_000),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidConfig(name, getattr(self, name), f"a number from {least} to {most:,}")


@dataclass(frozen=True, slots=True)
class LearntKeywords:
    """``profile`` and how well it tells apart what it was learnt from (``train``) and what it was not (``held_out``).

    ``held_out_prompts``: to hold other keywords to the same. ``by_size``: accuracy on parts of the training prompts
    that were put aside in turn, by how often a keyword was listed or dropped; the last is what was done.
    """

    profile: Profile
    train: Evaluation
    held_out: Evaluation
    held_out_prompts: tuple[LabelledPrompt, ...]
    by_size: Mapping[int, float]


def learn_keywords(
    prompts: Sequence[LabelledPrompt],
    *,
    seed: int = 0,
    start: Profile | None = None,
    config: LearnConfig = LearnConfig(),
) -> LearntKeywords:
    """Learns a file of keywords for the extractor's rule. The same prompts, in any order, and seed give the same.

    Prompts of one ``wording`` are never on both sides of a split, and weigh less the more of them there are: what
    counts is how clients that were not seen put it. Prompts without one are each a wording of their own. With
    ``start`` its keywords are what learning begins with; any of them may be dropped. Raises InvalidConfig.
    """
    _check(prompts)
    prompts = sorted(set(prompts), key=lambda one: (_place(one, seed), one.prompt, one.task_type))
    names = tuple(sorted({one.task_type for one in prompts} | set(start.names if start is not None else ())))
    train, held_out = _split(prompts, config.held_out)
    train = sorted(train, key=lambda one: (_place(one, seed), one.prompt, one.task_type))[: config.most_prompts]
    size, by_size = _best_size(train, names, start, config)
    learner = _Learner(train, names, start, config)
    learner.selection.run(size)
    profile = learner.profile(size, seed)
    extractor = KeywordExtractor(profile)
    return LearntKeywords(
        profile=profile,
        train=evaluate(extractor, train),
        held_out=evaluate(extractor, held_out),
        held_out_prompts=tuple(held_out),
        by_size=by_size,
    )


class _Learner:
    """Keywords from all prompts given."""

    def __init__(
        self, prompts: Sequence[LabelledPrompt], names: tuple[str, ...], start: Profile | None, config: LearnConfig
    ) -> None:
        self._prompts = prompts
        self._names = names
        self.look_at = LookAt() if start is None else start.look_at
        self._started = _types_of(start, names)
        numbers: dict[str, int] = {}
        wording: Ints = np.array([numbers.setdefault(_wording(one), len(numbers)) for one in prompts], dtype=np.int64)
        prompts_of_wording = np.bincount(wording).astype(np.float64)
        weights = prompts_of_wording[wording] ** -0.5
        self._phrases = Phrases(prompts, self.look_at, most_words=config.most_words, also=self._started)
        least = min(config.least_wordings, max(1, len(numbers) // 10))
        self._wording = wording
        self.candidates = self._phrases.candidates(wording, max(least, len(numbers) // 1000))
        listed = np.zeros((len(self.candidates.phrases), len(names)), dtype=np.bool_)
        for candidate, phrase in enumerate(self.candidates.phrases):
            listed[candidate, self._started.get(phrase, [])] = True
        self.selection = Selection(
            self.candidates,
            np.array([names.index(one.task_type) for one in prompts], dtype=np.int64),
            len(names),
            weights=weights / weights.mean(),
            price=_PRICE,
            listed=listed,
        )

    def keywords(self, moves: int) -> dict[str, list[Phrase]]:
        """By type, after so many moves; those to start from that occur in no prompt stay as they are."""
        listed: Flags = self.selection.listed_after(moves)
        found: dict[str, list[Phrase]] = {name: [] for name in self._names}
        for candidate, kind in np.argwhere(listed).tolist():
            found[self._names[kind]].append(self.candidates.phrases[candidate])
        occurring = set(self.candidates.phrases)
        for phrase, kinds in self._started.items():
            if phrase not in occurring:
                for kind in kinds:
                    found[self._names[kind]].append(phrase)
        return found

    def profile(self, moves: int, seed: int) -> Profile:
        """With at least one keyword for each type, in the order in which ties go right most often."""
        found = self.keywords(moves)
        for name, phrases in found.items():
            if not phrases:
                phrases.append(self._most_telling(name))
        profile = _profile(found, self.look_at)
        order = _order(profile, self._prompts)
        return _profile({name: found[name] for name in order}, self.look_at, f"learnt, seed {seed}")

    def _most_telling(self, name: str) -> Phrase:
        """The phrase whose prompts are of the type by the largest odds, where none was worth listing."""
        candidates = self._phrases.candidates(self._wording, 1)
        own = np.array([one.task_type == name for one in self._prompts])
        if not len(candidates.phrases) or not own[candidates.prompt_at].any():
            raise InvalidConfig("prompts", name, "a type whose prompts have words, for keywords to be found in them")
        pairs = np.unique(candidates.of * candidates.prompts + candidates.prompt_at[candidates.at])
        of, mine = pairs // candidates.prompts, own[pairs % candidates.prompts]
        inside = np.bincount(of, weights=mine)
        outside = np.bincount(of, weights=~mine)
        return candidates.phrases[int(np.argmax((inside + 0.5) / (outside + 0.5)))]


def _best_size(
    prompts: Sequence[LabelledPrompt], names: tuple[str, ...], start: Profile | None, config: LearnConfig
) -> tuple[int, dict[int, float]]:
    """How many moves are worth it: the fewest within a standard error of the best on parts put aside; and accuracy
    by number of moves, empty where the prompts are too few to put any aside."""
    sizes = sorted({size for size in _SIZES if size < config.most_keywords} | {config.most_keywords})
    parts = _parts(prompts, config.folds)
    shares: dict[int, list[float]] = {size: [] for size in sizes}
    for number, aside in enumerate(parts):
        rest = [one for other, part in enumerate(parts) if other != number for one in part]
        if not aside or {one.task_type for one in aside} - {one.task_type for one in rest}:
            continue
        learner = _Learner(rest, names, start, config)
        learner.selection.run(config.most_keywords)
        for size in sizes:
            found = {name: phrases for name, phrases in learner.keywords(size).items() if phrases}
            extractor = KeywordExtractor(_profile(found, learner.look_at)) if found else None
            shares[size].append(0.0 if extractor is None else evaluate(extractor, aside).accuracy)
    if not shares[sizes[0]]:
        return config.most_keywords, {}
    means = {size: float(np.mean(shares[size])) for size in sizes}
    best = max(sizes, key=lambda size: means[size])
    error = float(np.std(shares[best])) / len(shares[best]) ** 0.5
    return min(size for size in sizes if means[size] >= means[best] - error), means


def _check(prompts: Sequence[LabelledPrompt]) -> None:
    counts = Counter(one.task_type for one in prompts)
    if len(counts) < 2:
        raise InvalidConfig("prompts", ", ".join(counts), "prompts of at least two task types")
    for name in counts:
        if not 1 <= len(name) <= _LONGEST_NAME or name == UNKNOWN:
            raise InvalidConfig("task_type", name, f"a name of 1 to {_LONGEST_NAME} characters that is not {UNKNOWN}")


def _wording(prompt: LabelledPrompt) -> str:
    return prompt.wording or prompt.prompt


def _place(prompt: LabelledPrompt, seed: int) -> bytes:
    """Where the prompt's wording stands in an order that has nothing to do with what it says."""
    return hashlib.blake2b(f"{seed}|{_wording(prompt)}".encode(errors="surrogatepass"), digest_size=8).digest()


def _by_type(prompts: Sequence[LabelledPrompt]) -> list[list[list[LabelledPrompt]]]:
    """The prompts of each wording together, the wordings by type: that of most of their prompts."""
    together: dict[str, list[LabelledPrompt]] = defaultdict(list)
    for one in prompts:
        together[_wording(one)].append(one)
    types: dict[str, list[list[LabelledPrompt]]] = defaultdict(list)
    for same in together.values():
        types[Counter(one.task_type for one in same).most_common(1)[0][0]].append(same)
    return [types[name] for name in sorted(types)]


def _split(prompts: Sequence[LabelledPrompt], held_out: float) -> tuple[list[LabelledPrompt], list[LabelledPrompt]]:
    """Training and held-out prompts: about that share of each type is held out, but never all that there is of it."""
    train: list[LabelledPrompt] = []
    aside: list[list[LabelledPrompt]] = []
    for wordings in _by_type(prompts):
        wanted = held_out * sum(map(len, wordings))
        taken = 0
        for same in wordings[:-1]:
            if taken + len(same) / 2 <= wanted:
                aside.append(same)
                taken += len(same)
            else:
                train += same
        train += wordings[-1]
    kept: list[LabelledPrompt] = []
    known = {one.task_type for one in train}
    for same in aside:
        types = {one.task_type for one in same}
        if types <= known:
            kept += same
        else:  # a wording of several types, of one of which there is no other
            train += same
            known |= types
    return train, kept


def _parts(prompts: Sequence[LabelledPrompt], number: int) -> list[list[LabelledPrompt]]:
    """The prompts in so many parts, a wording in one of them, with about as many prompts of a type in each."""
    parts: list[list[LabelledPrompt]] = [[] for _ in range(number)]
    for wordings in _by_type(prompts):
        filled = [0] * number
        for same in wordings:
            part = filled.index(min(filled))
            filled[part] += len(same)
            parts[part] += same
    return parts


def _types_of(start: Profile | None, names: tuple[str, ...]) -> dict[Phrase, list[int]]:
    """The numbers of the types that list each keyword."""
    types: dict[Phrase, list[int]] = {}
    for task in () if start is None else start.task_types:
        for keyword in task.keywords:
            types.setdefault(tuple(words(keyword)), []).append(names.index(task.name))
    return types


def _profile(keywords: Mapping[str, Sequence[Phrase]], look_at: LookAt, revision: str = "") -> Profile:
    return Profile(
        format="greenroom-task-keywords",
        version=1,
        revision=revision,
        look_at=look_at,
        task_types=tuple(
            TypeKeywords(name, tuple(sorted(" ".join(phrase) for phrase in phrases)))
            for name, phrases in keywords.items()
        ),
    )


def _order(profile: Profile, prompts: Sequence[LabelledPrompt]) -> list[str]:
    """The types, those first to which more ties between them belong than to the others."""
    extractor = KeywordExtractor(profile)
    won: Counter[tuple[str, str]] = Counter()
    for one in prompts:
        matches = extractor.extract(one.prompt).scores
        most = max(matches.values(), default=0)
        tied = [name for name, count in matches.items() if count == most]
        if one.task_type in tied:
            won.update((one.task_type, other) for other in tied if other != one.task_type)
    left = list(profile.names)
    order: list[str] = []
    while left:
        first = max(left, key=lambda name: sum(won[name, other] - won[other, name] for other in left))
        order.append(first)
        left.remove(first)
    return order
