"""How much wrong routing in the first layers changes a task's answers (eMoE, section 2.2.3, Fig. 5)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from greenroom.core.model_profile import Sensitivity
from greenroom.profiling.measures.similarity import Similarity
from greenroom.profiling.model.confinement import RandomRouting
from greenroom.profiling.model.profiled_model import Answer, Asked, ProfileFailed, Subject


def insensitive_prefix(similarity: Sequence[float], threshold: float) -> int:
    """The most first layers such that for them and every fewer the similarity is at least ``threshold``.

    ``similarity[n]``: with the first n layers routed at random, n from 0 on.
    """
    layers = 0
    while layers + 1 < len(similarity) and similarity[layers + 1] >= threshold:
        layers += 1
    return layers if similarity and similarity[0] >= threshold else 0


def limit_of(undisturbed: Answer, most: int) -> int:
    """The most tokens of a disturbed answer. One that has not ended at twice the length will not become alike."""
    return min(most, 2 * len(undisturbed.token_ids) + 8)


@dataclass(frozen=True, slots=True, eq=False)
class Disturbed:
    """``similarity[seeds, layers + 1, prompts]``: to the undisturbed answer. ``right``, likewise: whether it is the
    right one, NaN of prompts without one.
    """

    similarity: NDArray[np.float64]
    right: NDArray[np.float64]

    def of(self, prompts: NDArray[np.bool_], threshold: float) -> Sensitivity:
        """Of the prompts of a task."""
        by_seed = self.similarity[:, :, prompts].mean(axis=2)
        mean = by_seed.mean(axis=0)
        right = self.right[:, :, prompts]
        known = not np.isnan(right).any()
        return Sensitivity(
            threshold=threshold,
            insensitive_layers=insensitive_prefix(mean.tolist(), threshold),
            similarity=_rounded(mean),
            least=_rounded(by_seed.min(axis=0)),
            most=_rounded(by_seed.max(axis=0)),
            exact=_rounded(right.mean(axis=(0, 2))) if known else None,
        )


def disturb(
    subject: Subject,
    asked: Sequence[Asked],
    undisturbed: Sequence[Answer],
    *,
    seeds: int,
    seed: int,
    most_tokens: int,
    similarity: Similarity,
    answered: Callable[[], object],
) -> Disturbed:
    """Route the first n MoE layers at random, n from 1 to all, for each of ``seeds``. Raises ProfileFailed."""
    layers = subject.catalogue.layers
    texts = [subject.text_of(answer.token_ids) for answer in undisturbed]
    limits = [limit_of(answer, most_tokens) for answer in undisturbed]
    alike = np.ones((seeds, layers + 1, len(asked)))
    right = np.full(alike.shape, np.nan)
    right[:, 0] = [_right(one, text) for one, text in zip(asked, texts, strict=True)]
    for repeat in range(seeds):
        for count in range(1, layers + 1):
            names: dict[int, int] = {}
            subject.policy.confine(RandomRouting(subject.catalogue, count, seed=seed + repeat, names=names))
            try:
                answers = subject.answers(asked, limits, places=names, answered=answered)
            finally:
                confined = subject.policy.confine(None)
            if not confined:
                raise ProfileFailed("no router of this model asked where its rows may go: they can not be disturbed")
            said = [subject.text_of(answer.token_ids) for answer in answers]
            alike[repeat, count] = similarity(list(zip(texts, said, strict=True)))
            right[repeat, count] = [_right(one, text) for one, text in zip(asked, said, strict=True)]
    return Disturbed(alike, right)


def _right(asked: Asked, said: str) -> float:
    return float("nan") if asked.answer is None else float(said.strip() == asked.answer.strip())


def _rounded(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(value), 4) for value in values)
