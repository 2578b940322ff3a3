"""What is compared: each learns from some origins, and then tells the task types of another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from greenroom.tasktype import Extractor
from greenroom.tasktype.embedding import EmbeddingFeatures
from greenroom.tasktype.evaluate import LabelledPrompt, evaluate
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from greenroom.tasktype.keywords.learn import LearnConfig as KeywordConfig
from greenroom.tasktype.keywords.learn import learn_keywords
from greenroom.tasktype.linear import InstructionFeatures, LinearExtractor
from greenroom.tasktype.linear.features import Blocks, PromptFeatures
from greenroom.tasktype.linear.learn import LearnConfig, learn_weights

Done = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """``accuracy``: by left-out origin. ``unknown``: share of prompts of which nothing is said; ``quiet``: that of
    texts that ask for nothing, None where it was not measured. ``extractor``: as it would serve, to take its time."""

    accuracy: Mapping[str, float]
    unknown: float
    quiet: float | None
    extractor: Extractor


Variant = Callable[[Sequence[LabelledPrompt], int, Done], Measured]
_DEFAULT: Final = LearnConfig()
_PLAIN: Final = LearnConfig(worded=0, without_a_wish=0.0)
_QUIET: Final = LearnConfig(worded=0)
_WORDS: Final = Blocks(characters=0.0, keywords=0.0, shape=0.0)
_CHARACTERS: Final = Blocks(keywords=0.0)


def shipped_keywords(prompts: Sequence[LabelledPrompt], seed: int, done: Done) -> Measured:
    """As they come with greenroom: nothing is learnt."""
    return _by_origin(prompts, lambda rest: KeywordExtractor(load_profile()), done)


def learnt_keywords(prompts: Sequence[LabelledPrompt], seed: int, done: Done) -> Measured:
    """As `greenroom keywords learn` makes them."""
    config = KeywordConfig(held_out=0.0)
    return _by_origin(
        prompts, lambda rest: KeywordExtractor(learn_keywords(rest, seed=seed, config=config).profile), done
    )


def linear(features: Callable[[], PromptFeatures], config: LearnConfig = _DEFAULT) -> Variant:
    def measured(prompts: Sequence[LabelledPrompt], seed: int, done: Done) -> Measured:
        seen = features()
        learnt = learn_weights(prompts, seen, seed=seed, config=config, done=done)
        left_out = learnt.left_out
        quiet = left_out.quiet if config.without_a_wish else None
        return Measured(left_out.accuracy, left_out.unknown, quiet, LinearExtractor(learnt.weights, seen))

    return measured


def _by_origin(
    prompts: Sequence[LabelledPrompt], learnt: Callable[[Sequence[LabelledPrompt]], Extractor], done: Done
) -> Measured:
    accuracy, unknown = {}, 0.0
    for origin in sorted({one.origin for one in prompts}):
        aside = [one for one in prompts if one.origin == origin]
        told = evaluate(learnt([one for one in prompts if one.origin != origin]), aside)
        accuracy[origin] = told.accuracy
        unknown += told.unknown * len(aside) / len(prompts)
        done()
    return Measured(accuracy, unknown, None, learnt(prompts))


VARIANTS: Final[Mapping[str, Variant]] = {
    "keywords": shipped_keywords,
    "keywords-learnt": learnt_keywords,
    "words": linear(lambda: InstructionFeatures(_WORDS), _PLAIN),
    "+characters": linear(lambda: InstructionFeatures(_CHARACTERS), _PLAIN),
    "+texts-without-a-wish": linear(lambda: InstructionFeatures(_CHARACTERS), _QUIET),
    "+wordings": linear(lambda: InstructionFeatures(_CHARACTERS)),
    "linear": linear(InstructionFeatures),
    "embedding": linear(EmbeddingFeatures),
}
"""Those that begin with + have what the one above has, and that; ``linear`` has the shipped keywords as
features too, and ``embedding`` a sentence embedding besides."""
