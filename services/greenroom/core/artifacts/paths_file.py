"""What foretells routing paths from tokens, as a file (ExpertFlow, section 3.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from greenroom.core.artifacts.artifact_file import ArtifactFile
from greenroom.core.artifacts.paths_forms import FORMS
from greenroom.core.errors import InvalidConfig

LARGEST_VOCABULARY = 2**24
"""Far above any tokenizer's. A larger number is no vocabulary."""

_FORM, _VOCABULARY = "form", "vocabulary"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PathsFile(ArtifactFile):
    """How probable it is that a token picks each expert of all layers, known before its forward.

    Not to be taken for ``PathFile``, by which a token's picks in its earlier layers foretell those in later ones.

    ``form``: one of ``paths_forms.FORMS``, which says what ``tensors`` there are. ``vocabulary``: all token ids that it
    was made from lie below it. In ``arrays``, which policies are handed, both are arrays too: the form's name as UTF-8
    bytes, and the number alone.
    """

    KIND: ClassVar[str] = "paths"
    MADE_BY: ClassVar[str] = "greenroom paths fit"

    form: str
    vocabulary: int
    tensors: Mapping[str, npt.NDArray[Any]]

    @property
    def arrays(self) -> Mapping[str, npt.NDArray[Any]]:
        return {
            _FORM: np.frombuffer(self.form.encode(), dtype=np.uint8),
            _VOCABULARY: np.array([self.vocabulary], dtype=np.uint32),
            **self.tensors,
        }

    @classmethod
    def of_arrays(
        cls, arrays: Mapping[str, npt.NDArray[Any]], experts_per_layer: tuple[int, ...], *, version: int = 1
    ) -> Self:
        """From what a policy or a predictor is handed. Raises InvalidConfig."""
        return cls(
            model="", experts_per_layer=experts_per_layer, sequences=0, version=version, **cls._fields_of(arrays)
        )

    @property
    def numbered_texts(self) -> str:
        """Of which texts its tokens are the numbers: ``texts_digest`` of the trace that it was made from. "": they are
        ids of the model."""
        return str(self.report.get("numbered_texts", ""))

    def check_model(self, experts_per_layer: tuple[int, ...], vocabulary: int | None = None) -> None:
        """Raises InvalidConfig where it is of another shape, or knows other tokens than those of the model's
        ``vocabulary``."""
        if self.experts_per_layer != experts_per_layer:
            layers, size = len(experts_per_layer), sum(experts_per_layer)
            raise InvalidConfig(self.KIND, self.shape, f"one of this model, {layers} layers with {size} experts in all")
        if vocabulary is not None and self.numbered_texts:
            allowed = "one made from this model's token ids; its trace had texts, which were numbered"
            raise InvalidConfig(self.KIND, "numbers of texts", allowed)
        if vocabulary is not None and self.vocabulary > vocabulary:
            allowed = f"one made from this model's tokens, whose ids lie below {vocabulary:,}"
            raise InvalidConfig(self.KIND, f"a vocabulary of {self.vocabulary:,}", allowed)

    @classmethod
    def _fields_of(cls, arrays: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, Any]:
        missing = [name for name in (_FORM, _VOCABULARY) if name not in arrays]
        if missing:
            raise InvalidConfig("arrays", sorted(arrays), f"with {' and '.join(missing)}")
        vocabulary = arrays[_VOCABULARY]
        if vocabulary.shape != (1,):
            raise InvalidConfig(_VOCABULARY, vocabulary.shape, "one number")
        return {
            "form": np.asarray(arrays[_FORM], dtype=np.uint8).tobytes().decode(errors="replace"),
            "vocabulary": int(vocabulary[0]),
            "tensors": {name: one for name, one in arrays.items() if name not in (_FORM, _VOCABULARY)},
        }

    def _check(self) -> None:
        if self.form not in FORMS:
            raise InvalidConfig("form", self.form, f"one of {', '.join(FORMS)}")
        if not 1 <= self.vocabulary <= LARGEST_VOCABULARY:
            raise InvalidConfig(_VOCABULARY, self.vocabulary, f"a number of token ids, 1 to {LARGEST_VOCABULARY:,}")
        FORMS[self.form](self.tensors, self.experts_per_layer, self.vocabulary)
