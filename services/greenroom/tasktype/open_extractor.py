"""Extractors by name."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from greenroom.core.errors import InvalidConfig, UnknownName
from greenroom.tasktype.embedding import EmbeddingFeatures, EmbeddingUnavailable
from greenroom.tasktype.extractor import Extractor
from greenroom.tasktype.keywords import KeywordExtractor, load_profile
from greenroom.tasktype.linear import InstructionFeatures, LinearExtractor, load_weights

_LOG = logging.getLogger(__name__)
DEFAULT_EXTRACTOR: Final = "linear"


def _linear(file: Path | None) -> Extractor:
    return LinearExtractor(load_weights(file), InstructionFeatures())


def _keywords(file: Path | None) -> Extractor:
    return KeywordExtractor(load_profile(file))


def _embedding(file: Path | None) -> Extractor:
    features = EmbeddingFeatures()
    if file is None:
        raise InvalidConfig("weights", None, "learn some: greenroom task-weights learn --features embedding")
    return LinearExtractor(load_weights(file), features, "embedding")


EXTRACTORS: Final[dict[str, Callable[[Path | None], Extractor]]] = {
    "linear": _linear,
    "keywords": _keywords,
    "embedding": _embedding,
}
SHIPPED_EXTRACTORS: Final = ("linear", "keywords")
"""Those that need no file: what they go by comes with greenroom."""


def open_extractor(name: str = DEFAULT_EXTRACTOR, file: Path | None = None) -> Extractor:
    """``file``: what it goes by; None: what comes with greenroom, which has none for the embedding.

    Where the package is not installed that an extractor needs, the default serves instead, and the log says so. Raises
    UnknownName; InvalidConfig where the file is not what it should be.
    """
    if name not in EXTRACTORS:
        raise UnknownName("extractor", name, EXTRACTORS)
    try:
        extractor = EXTRACTORS[name](file)
    except EmbeddingUnavailable as error:
        _LOG.warning("%s; task types are told by %s instead", error, DEFAULT_EXTRACTOR)
        extractor = EXTRACTORS[DEFAULT_EXTRACTOR](None)
    _LOG.info("task types are told by %s: %s", extractor.name, ", ".join(extractor.names))
    return extractor
