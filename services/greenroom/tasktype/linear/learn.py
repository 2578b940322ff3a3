"""Weights of a linear head from labelled prompts of several origins, for prompts of origins that were not seen."""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import numpy as np

from greenroom.core.errors import InvalidConfig
from greenroom.tasktype.evaluate import LabelledPrompt
from greenroom.tasktype.extractor import UNKNOWN
from greenroom.tasktype.linear.features import PromptFeatures
from greenroom.tasktype.linear.head import Floats, Rows, fit_shares, most_probable, probabilities
from greenroom.tasktype.linear.weights import Weights
from greenroom.tasktype.linear.wordings import texts_without_a_wish, worded_prompts

_OURS: Final = "greenroom"
"""The origin of wordings that come with greenroom. It is never left out."""
_SCALE: Final = 0.001
_NOTHING: Final = 0.5
"""How probable `unknown` should be for a text that asks for nothing. The rest is the types', all alike: so words of a
topic get no weight, though all prompts about it may be of one type."""
_BIAS: Final = 0.1
"""What the bias adds to each product of two rows: it costs ten times as much as other features, and stays small."""
_TOTAL: Final = 100.0
_TEMPERATURES: Final = np.geomspace(0.1, 5.0, 80)
_THRESHOLDS: Final = np.arange(0.0, 0.95, 0.005)
_SLICED_CHARS: Final = (150, 400, 900)
_LEAST_SLICED_CHARS: Final = 700
_LEAST_TEXT_CHARS: Final = 60
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n+")


@dataclass(frozen=True, slots=True)
class LearnConfig:
    """``penalty``, ``rounds``: see ``fit_shares``. ``each_wording``: prompts of a wording that are learnt from.
    ``worded``: prompts of each wording that comes with greenroom; 0: none of these. ``worded_share``: what they count
    beside the given ones. ``without_a_wish``: what texts that ask for nothing count beside one type. ``sliced``: such
    texts of each origin, out of its long prompts: as many cut anywhere, as many of whole sentences. ``most_features``
    are kept. ``most_lost``: how much accuracy the least probability may cost."""

    penalty: float = 1.0
    rounds: int = 60
    each_wording: int = 4
    worded: int = 2
    worded_share: float = 1.0
    without_a_wish: float = 2.0
    sliced: int = 8
    most_features: int = 20_000
    most_lost: float = 0.01


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a head says of origins that it was not fitted to. ``accuracy``: by origin. ``unknown``: the share of prompts
    of which nothing is said, and ``quiet`` that of texts that ask for nothing."""

    accuracy: Mapping[str, float]
    unknown: float
    quiet: float

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.accuracy.values())))


@dataclass(frozen=True, slots=True)
class LearntWeights:
    weights: Weights
    left_out: LeftOut


@dataclass(slots=True)
class _Examples:
    """Rows to fit to, as lists. ``task_type`` None: a text that asks for nothing."""

    texts: list[str] = field(default_factory=list)
    task_types: list[str | None] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)

    def add(self, text: str, task_type: str | None, origin: str) -> None:
        self.texts.append(text)
        self.task_types.append(task_type)
        self.origins.append(origin)


def learn_weights(
    prompts: Sequence[LabelledPrompt],
    features: PromptFeatures,
    *,
    seed: int = 0,
    config: LearnConfig = LearnConfig(),
    card: Mapping[str, Any] | None = None,
    done: Callable[[], None] = lambda: None,
) -> LearntWeights:
    """The same prompts, in any order, and seed give the same weights.

    ``features``: what the head sees of a prompt. Every origin is left out once: what is then said of it sets the
    temperature and the least probability, and is what ``left_out`` reports. The weights themselves are of all origins.
    Prompts without an origin are dealt to eight by their wording. ``done`` is called after each fit. Raises
    InvalidConfig.
    """
    _check(prompts)
    learner = _Learner(prompts, features, seed, config)
    scores = learner.scores_left_out(done)
    temperature = learner.temperature(scores)
    shares = probabilities(scores / temperature)
    least = learner.least_probability(shares)
    left_out = learner.report(shares, least)
    return LearntWeights(
        Weights(
            format="greenroom-task-weights",
            version=1,
            features=features.name,
            task_types=learner.columns,
            temperature=round(temperature, 4),
            least_probability=round(least, 4),
            scale=_SCALE,
            card={**(card or {}), **learner.card(left_out), "seed": seed},
            **learner.fitted(),
        ),
        left_out,
    )


def origins_of(prompts: Iterable[LabelledPrompt]) -> int:
    """How many origins are left out in turn."""
    return len({_origin(one) for one in prompts})


class _Learner:
    def __init__(
        self, prompts: Sequence[LabelledPrompt], features: PromptFeatures, seed: int, config: LearnConfig
    ) -> None:
        self._config = config
        self.names = tuple(sorted({one.task_type for one in prompts}))
        examples = _examples(prompts, self.names, seed, config)
        found = [features(text) for text in examples.texts]
        counts = Counter(name for row in found for name in row)
        self._vocabulary = {
            name: number for number, name in enumerate(sorted(name for name, count in counts.items() if count > 1))
        }
        self._rows = Rows.of(found, self._vocabulary)
        self._products = self._rows.products() + np.float32(_BIAS)
        self._origins = np.array(examples.origins)
        kinds = [-1 if one is None else self.names.index(one) for one in examples.task_types]
        self._kinds = np.array(kinds, dtype=np.int64)
        self._given = (self._origins != _OURS) & (self._kinds >= 0)
        types, typed = len(self.names), np.flatnonzero(self._kinds >= 0)
        self.columns = self.names if len(typed) == len(kinds) else (*self.names, UNKNOWN)
        self._targets = np.full((len(kinds), len(self.columns)), (1.0 - _NOTHING) / types, dtype=np.float32)
        self._targets[:, types:] = _NOTHING
        self._targets[typed] = np.eye(len(self.columns), dtype=np.float32)[self._kinds[typed]]

    # -- fitting -------------------------------------------------------------------------------------------------

    def scores_left_out(self, done: Callable[[], None]) -> Floats:
        """[rows, columns]: each given row's by a head that knows nothing of its origin; of others zeros."""
        scores = np.zeros_like(self._targets)
        for origin in sorted(set(self._origins[self._origins != _OURS])):
            out = self._origins == origin
            kept, shares = self._fit(~out)
            scores[out] = self._products[np.ix_(out, kept)] @ shares
            done()
        return scores

    def fitted(self) -> dict[str, Any]:
        """Weights and bias of a head of all rows, as the file has them: the features that weigh most."""
        kept, shares = self._fit(np.ones(len(self._kinds), dtype=np.bool_))
        all_shares = np.zeros_like(self._targets)
        all_shares[kept] = shares
        steps = np.rint(self._rows.combined(all_shares) / _SCALE).astype(np.int64)
        weight = np.abs(steps).max(axis=1)
        chosen = np.argsort(-weight, kind="stable")[: self._config.most_features]
        names = sorted(self._vocabulary, key=self._vocabulary.__getitem__)
        return {
            "bias": tuple(round(float(one), 5) for one in _BIAS * shares.sum(axis=0)),
            "weights": {names[row]: tuple(steps[row].tolist()) for row in sorted(chosen.tolist()) if weight[row]},
        }

    def _fit(self, among: Any) -> tuple[Any, Floats]:
        weights = self._weights(among)
        kept = weights > 0
        shares = fit_shares(
            np.ascontiguousarray(self._products[np.ix_(kept, kept)]),
            self._targets[kept],
            weights[kept],
            penalty=self._config.penalty,
            rounds=self._config.rounds,
        )
        return kept, shares

    def _weights(self, among: Any) -> Floats:
        """What each row counts. Types count alike; within a type an origin counts as the root of its rows."""
        config = self._config
        weights = np.zeros(len(self._kinds), dtype=np.float64)
        ours = self._origins == _OURS
        for kind in range(len(self.names)):
            rows = among & self._given & (self._kinds == kind)
            numbers = dict(zip(*np.unique(self._origins[rows], return_counts=True), strict=True))
            weights[rows] = [numbers[origin] ** -0.5 for origin in self._origins[rows]]
            _scale_to(weights, rows, _TOTAL)
            rows = among & ours & (self._kinds == kind)
            weights[rows] = 1.0
            _scale_to(weights, rows, _TOTAL * config.worded_share)
        quiet = among & (self._kinds < 0)
        weights[quiet & ours] = 3.0
        weights[quiet & ~ours] = 1.0
        _scale_to(weights, quiet, _TOTAL * config.without_a_wish)
        return weights.astype(np.float32)

    # -- calibrating ---------------------------------------------------------------------------------------------

    def temperature(self, scores: Floats) -> float:
        """The one under which left-out prompts have the largest likelihood, every origin counting alike."""
        rows = np.flatnonzero(self._given)
        numbers = Counter(self._origins[rows].tolist())
        weights = np.array([1.0 / numbers[origin] for origin in self._origins[rows].tolist()])
        kinds = self._kinds[rows]

        def loss(temperature: float) -> float:
            shares = probabilities((scores[rows] / temperature).astype(np.float32))
            likely = np.maximum(shares[np.arange(len(rows)), kinds], 1e-9)
            return float(-(weights * np.log(likely)).sum())

        return float(min(_TEMPERATURES, key=loss))

    def least_probability(self, shares: Floats) -> float:
        """The largest that costs no more accuracy, averaged over left-out origins, than it may."""
        without = self.report(shares, 0.0).mean
        allowed = [
            least for least in _THRESHOLDS if self.report(shares, float(least)).mean >= without - self._config.most_lost
        ]
        return float(max(allowed))

    def report(self, shares: Floats, least: float) -> LeftOut:
        best, how_sure = most_probable(shares, len(self.names))
        sure = how_sure >= least
        right = (best == self._kinds) & sure
        accuracy = {
            origin: float(right[self._given & (self._origins == origin)].mean())
            for origin in sorted(set(self._origins[self._given].tolist()))
        }
        quiet = (self._origins != _OURS) & (self._kinds < 0)
        return LeftOut(
            accuracy=accuracy,
            unknown=float((~sure[self._given]).mean()),
            quiet=float((~sure[quiet]).mean()) if quiet.any() else 1.0,
        )

    def card(self, left_out: LeftOut) -> dict[str, Any]:
        return {
            "prompts_by_origin": dict(sorted(Counter(self._origins[self._given].tolist()).items())),
            "wordings_of_greenroom": int(((self._origins == _OURS) & (self._kinds >= 0)).sum()),
            "task_accuracy_unseen": round(left_out.mean, 4),
            "unknown_unseen": round(left_out.unknown, 4),
            "unknown_of_texts_without_a_wish": round(left_out.quiet, 4),
        }


def _examples(prompts: Sequence[LabelledPrompt], names: Sequence[str], seed: int, config: LearnConfig) -> _Examples:
    examples = _Examples()
    by_wording: dict[tuple[str, str], list[LabelledPrompt]] = defaultdict(list)
    for one in sorted(set(prompts), key=lambda one: _place(f"{seed}|{one.prompt}|{one.task_type}")):
        by_wording[one.task_type, one.wording or one.prompt].append(one)
    for _, ones in sorted(by_wording.items()):
        for one in ones[: config.each_wording]:
            examples.add(one.prompt, one.task_type, _origin(one))
    for text, origin in _slices(prompts, seed, config.sliced) if config.without_a_wish else ():
        examples.add(text, None, origin)
    if config.worded:
        for one in worded_prompts(config.worded, seed):
            if one.task_type in names:
                examples.add(one.prompt, one.task_type, _OURS)
        if config.without_a_wish:
            for text in texts_without_a_wish():
                examples.add(text, None, _OURS)
    return examples


def _slices(prompts: Sequence[LabelledPrompt], seed: int, each: int) -> list[tuple[str, str]]:
    """Texts out of the middle of long prompts, where no wish stands, and their origins: ``each`` of every origin cut
    anywhere, and as many of whole sentences, as texts begin and end that are no part of a prompt."""
    found: list[tuple[str, str]] = []
    for kind, sliced in (("slice", _cut_anywhere), ("sentences", _whole_sentences)):
        texts: dict[str, list[str]] = defaultdict(list)
        for one in sorted(set(prompts), key=lambda one: _place(f"{seed}|{kind}|{one.prompt}")):
            origin = _origin(one)
            if len(one.prompt) < _LEAST_SLICED_CHARS or len(texts[origin]) >= each:
                continue
            middle = one.prompt[len(one.prompt) // 4 : -len(one.prompt) // 4]
            text = sliced(middle, Random(f"{seed}|{one.prompt}").choice(_SLICED_CHARS))
            if len(text) >= _LEAST_TEXT_CHARS:
                texts[origin].append(text)
        found += [(text, origin) for origin, own in sorted(texts.items()) for text in own]
    return found


def _cut_anywhere(middle: str, chars: int) -> str:
    _, _, whole_words = middle.partition(" ")
    return whole_words[:chars]


def _whole_sentences(middle: str, chars: int) -> str:
    """Those that fit, and one in any case."""
    sentences = [one for one in _SENTENCE_END.split(middle)[1:-1] if one.strip()]
    text = ""
    for sentence in sentences:
        longer = f"{text} {sentence}".strip()
        if text and len(longer) > chars:
            break
        text = longer
    return text


def _scale_to(weights: Any, rows: Any, total: float) -> None:
    if (sum_of_them := weights[rows].sum()) > 0:
        weights[rows] *= total / sum_of_them


def _origin(prompt: LabelledPrompt) -> str:
    return prompt.origin or f"part {_place(prompt.wording or prompt.prompt)[0] % 8}"


def _place(text: str) -> bytes:
    """Where a text stands in an order that has nothing to do with what it says."""
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()


def _check(prompts: Sequence[LabelledPrompt]) -> None:
    names = {one.task_type for one in prompts}
    if len(names) < 2:
        raise InvalidConfig("prompts", ", ".join(names), "prompts of at least two task types")
    for name in names:
        if not 1 <= len(name) <= 64 or name == UNKNOWN:
            raise InvalidConfig("task_type", name, f"a name of 1 to 64 characters that is not {UNKNOWN}")
    origins = {_origin(one) for one in prompts}
    if _OURS in origins:
        raise InvalidConfig("origin", _OURS, "another name: it is that of the wordings that come with greenroom")
    if len(origins) < 2:
        raise InvalidConfig("origin", ", ".join(origins), "prompts of at least two origins, each left out in turn")
