"""A sentence embedding among the features, where its package is installed."""

from greenroom.tasktype.embedding.features import EmbeddingFeatures
from greenroom.tasktype.embedding.minilm import EmbeddingUnavailable

__all__ = ["EmbeddingFeatures", "EmbeddingUnavailable"]
