"""From images and texts to a model's inputs, by the checkpoint's own image processor or tokenizer."""

from __future__ import annotations

import json
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import xxhash
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer

from greenroom.coe.computing.images import MAX_PIXELS, decode_image, decoded_bytes, largest_image
from greenroom.coe.loading.architecture import Architecture
from greenroom.coe.loading.expert_checkpoint import IMAGE_SETTINGS, TOKENIZERS, ExpertCheckpoint, InputKind, Task
from greenroom.core.errors import CorruptCheckpoint, InvalidRequest, UnsupportedModel

Input = bytes | str | Image.Image
"""An image (PNG or JPEG, or decoded as RGB) or a text (UTF-8 where it is bytes)."""

UNLIMITED_TOKENS: Final = 4096
"""What a text may have where neither model nor tokenizer has a limit: memory has one."""
LEAST_CHARACTERS: Final = 65_536
CHARACTERS_A_TOKEN: Final = 16
"""Of a long text so many characters are read for each token that is taken of it, but at least LEAST_CHARACTERS. Those
count that compatibility decomposition makes of it (NFKD), as some tokenizers do: it makes up to 18 of one.
"""
_MOST_OF_ONE: Final = 18
BYTES_A_CHARACTER: Final = 500
"""What a tokenizer takes at most of a text that it reads: 110 to 410 were measured, and allocators keep some."""
_SENTENCES: Final = "sentence_bert_config.json"
_NO_LIMIT: Final = 10**9  # tokenizers without a limit name a number beyond it
_TOKENIZER_FILES: Final = (
    *TOKENIZERS, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    _SENTENCES,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Prepared:
    """What one forward takes. ``tensors``: the model's arguments by name. ``sizes``: (height, width) of each image; of
    texts empty. ``places``: of each input among those that were prepared together.
    """

    tensors: dict[str, torch.Tensor] = field(repr=False)
    sizes: tuple[tuple[int, int], ...] = ()
    places: tuple[int, ...] = ()

    def to(self, device: torch.device, dtype: torch.dtype) -> Prepared:
        """Numbers that are no integers become ``dtype``, as a model of that dtype needs them."""
        moved = {
            name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in self.tensors.items()
        }
        return Prepared(moved, self.sizes, self.places)


class Preparation(Protocol):
    """May be used by several threads at once."""

    @property
    def nbytes(self) -> int:
        """What it takes at most while it reads one input."""
        ...

    def read(self, given: Input, name: str) -> Prepared:
        """One input, checked and prepared by itself, so that memory holds one at a time that is decoded.

        ``name``: what errors call it. Raises InvalidRequest.
        """
        ...

    def together(self, read: Sequence[Prepared]) -> list[Prepared]:
        """What ``read`` gave, in parts of one prepared size each: none is padded that the model does not mask.

        So what becomes of an input does not depend on the others.
        """
        ...


def _unprepared(name: str, error: Exception) -> InvalidRequest:
    return InvalidRequest(f"{name} can not be prepared: {error!s:.200}", code="invalid_input")


def _joined(read: Sequence[Prepared]) -> list[Prepared]:
    """Those together that have one size."""
    alike: dict[tuple[Any, ...], list[Prepared]] = {}
    for place, one in enumerate(read):
        shapes = tuple(sorted((name, tuple(tensor.shape[1:])) for name, tensor in one.tensors.items()))
        alike.setdefault(shapes, []).append(replace(one, places=(place,)))
    return [_together(parts) for parts in alike.values()]


def _together(parts: Sequence[Prepared]) -> Prepared:
    if len(parts) == 1:
        return parts[0]
    return Prepared(
        {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors},
        tuple(size for part in parts for size in part.sizes),
        tuple(place for part in parts for place in part.places),
    )


class ImagePreparation:
    """``processor``: a checkpoint's own image processor."""

    def __init__(self, processor: Any, max_pixels: int = MAX_PIXELS) -> None:
        self.processor = processor
        self._max_pixels = max_pixels

    @property
    def nbytes(self) -> int:
        return decoded_bytes(self._max_pixels)

    @property
    def largest(self) -> tuple[int, int]:
        """Width and height of an image of which it makes the most pixels."""
        return largest_image(getattr(self.processor, "size", None))

    def read(self, given: Input, name: str) -> Prepared:
        if isinstance(given, str):
            raise InvalidRequest(f"{name} is a text; the expert needs an image", param=name, code="invalid_image")
        image = given if isinstance(given, Image.Image) else decode_image(given, name, self._max_pixels)
        try:
            tensors = dict(self.processor(images=[image], return_tensors="pt"))
        except Exception as error:  # the image and the settings are untrusted, so a processor may raise anything
            raise _unprepared(name, error) from error
        return Prepared(tensors, ((image.height, image.width),), (0,))

    def together(self, read: Sequence[Prepared]) -> list[Prepared]:
        """Detectors' processors would pad all to the largest. YOLOS gets no mask, so its boxes would be shares of the
        padded image; DETR gets one, but its backbone sees the padding at the image's edge.
        """
        return _joined(read)

    def boxes(self, outputs: Any, sizes: Sequence[tuple[int, int]], least_score: float) -> list[Any]:
        """Of each image a mapping with ``scores``, ``labels`` and ``boxes``, by the checkpoint's own processor."""
        found: list[Any] = self.processor.post_process_object_detection(outputs, least_score, list(sizes))
        return found


class TextPreparation:
    """``tokenizer``: a checkpoint's own. ``longest``: tokens; what is behind them is cut off. None: neither model nor
    tokenizer has a limit. Then nothing is cut off, and a text of more than ``UNLIMITED_TOKENS`` is refused.
    """

    def __init__(self, tokenizer: Any, longest: int | None) -> None:
        self.tokenizer = tokenizer
        self.longest = UNLIMITED_TOKENS if longest is None else longest
        self.characters = max(LEAST_CHARACTERS, CHARACTERS_A_TOKEN * self.longest)
        self._cuts = longest is not None
        # Padding on the left moves a text's positions, which some models count from the row's begin.
        self._pads = "attention_mask" in tokenizer.model_input_names and tokenizer.padding_side == "right"
        self._lock = threading.Lock()  # a call changes the tokenizer's settings of padding and truncation

    @property
    def nbytes(self) -> int:
        return BYTES_A_CHARACTER * self.characters

    def read(self, given: Input, name: str) -> Prepared:
        """A tokenizer takes memory for all of a text before it cuts it, so of a very long one it gets the begin, or the
        end if that is what it keeps. That is refused if fewer tokens come of it than are taken.
        """
        text, whole = _text(given, name), True
        within = _within(text, self.characters, last=self.tokenizer.truncation_side == "left")
        if len(within) < len(text):
            if not self._cuts:
                raise _too_long(name, f"{len(text)} characters", f"{self.characters} characters")
            text, whole = within, False
        try:
            if not whole and len(self._tokens(text, cuts=False)["input_ids"]) <= self.longest:
                raise _too_long(name, "few tokens in very many characters", f"{self.characters} characters")
            tokens = self._tokens(text, cuts=self._cuts)
        except InvalidRequest:
            raise
        except Exception as error:  # the text and the settings are untrusted, so a tokenizer may raise anything
            raise _unprepared(name, error) from error
        if (count := len(tokens["input_ids"])) > self.longest:
            raise _too_long(name, f"{count} tokens", f"{self.longest}")
        if not count:
            raise InvalidRequest(f"{name} has no tokens; send a text", param=name, code="invalid_text")
        return Prepared({key: torch.tensor([own]) for key, own in tokens.items()}, places=(0,))

    def together(self, read: Sequence[Prepared]) -> list[Prepared]:
        """All together where the model is told what is padding, and it is on the right; else those of one length."""
        if not self._pads or len(read) < 2:
            return _joined(read)
        rows = {key: [one.tensors[key][0].tolist() for one in read] for key in read[0].tensors}
        with self._lock:
            padded = self.tokenizer.pad(rows, return_tensors="pt")
        return [Prepared(dict(padded), places=tuple(range(len(read))))]

    def _tokens(self, text: str, *, cuts: bool) -> dict[str, list[int]]:
        with self._lock:
            return dict(self.tokenizer(text, truncation=cuts, max_length=self.longest if cuts else None, verbose=False))


def _text(given: Input, name: str) -> str:
    if isinstance(given, Image.Image):
        raise InvalidRequest(f"{name} is an image; the expert needs a text", param=name, code="invalid_text")
    try:
        text = given if isinstance(given, str) else given.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is no UTF-8: {error}", param=name, code="invalid_text") from error
    if not text.strip():
        raise InvalidRequest(f"{name} is empty; send a text", param=name, code="invalid_text")
    return text


def _within(text: str, characters: int, *, last: bool) -> str:
    """The first of its characters, or the ``last``, that make at most so many; all if those do.

    No part of a word if there is a space among them: tokens depend on whole words.
    """
    if _MOST_OF_ONE * len(text) <= characters:
        return text
    part = text[-characters:] if last else text[:characters]
    while (made := sum(len(unicodedata.normalize("NFKD", one)) for one in _pieces(part))) > characters:
        kept = max(1, min(len(part) - 1, len(part) * characters // made))
        part = part[-kept:] if last else part[:kept]
    if len(part) == len(text):
        return text
    words = part.split(maxsplit=1) if last else part.rsplit(maxsplit=1)
    return words[-1 if last else 0] if len(words) > 1 else part


def _pieces(text: str, size: int = 4096) -> Iterator[str]:
    """Small enough that what is made of each takes little."""
    return (text[at : at + size] for at in range(0, len(text), size))


def _too_long(name: str, has: str, most: str) -> InvalidRequest:
    return InvalidRequest(
        f"{name} has {has}; the expert takes at most {most}: send it in parts", param=name, code="invalid_text"
    )


class Preparations:
    """Experts' preparations. Experts whose files for it are equal share one: there may be hundreds."""

    def __init__(self, max_pixels: int = MAX_PIXELS) -> None:
        self._max_pixels = max_pixels
        self._made: dict[str, Preparation] = {}

    def of(self, checkpoint: ExpertCheckpoint, architecture: Architecture) -> Preparation:
        """Raises CorruptCheckpoint, which names the file, if it can not be made."""
        images = checkpoint.takes is InputKind.IMAGE
        longest = None if images else longest_text(checkpoint.folder, architecture.model)
        key = _digest(checkpoint, (IMAGE_SETTINGS,) if images else _TOKENIZER_FILES, longest)
        if key not in self._made:
            made = image_preparation(checkpoint, self._max_pixels) if images else _texts(checkpoint, longest)
            self._made[key] = made
        return self._made[key]


def image_preparation(checkpoint: ExpertCheckpoint, max_pixels: int = MAX_PIXELS) -> ImagePreparation:
    """By the checkpoint's own image processor. Raises CorruptCheckpoint, UnsupportedModel."""
    try:
        processor = AutoImageProcessor.from_pretrained(
            checkpoint.folder, backend="pil", trust_remote_code=False, local_files_only=True
        )
    except Exception as error:  # the JSON is untrusted, so transformers may raise anything
        raise CorruptCheckpoint(f"{IMAGE_SETTINGS} of {checkpoint.model} is not valid: {error}") from error
    if checkpoint.task is Task.OBJECT_DETECTION and not hasattr(processor, "post_process_object_detection"):
        raise CorruptCheckpoint(
            f"{IMAGE_SETTINGS} of {checkpoint.model} is of a {type(processor).__name__}, which finds no objects"
        )
    if not getattr(processor, "do_resize", True) and not getattr(processor, "do_center_crop", False):
        raise UnsupportedModel(
            f"{IMAGE_SETTINGS} of {checkpoint.model} neither resizes nor crops, so what a batch takes has no bound: "
            "set do_resize and size"
        )
    return ImagePreparation(processor, max_pixels)


def longest_text(folder: Path, model: Any) -> int | None:
    """How many tokens a text may have: as sentence-transformers' settings say, or as the model has positions.

    Models whose positions count from behind the padding's number, as RoBERTa's, have fewer than embeddings of them.
    None: neither says. Raises CorruptCheckpoint.
    """
    limits = []
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            limits.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    try:
        limits.append(int(json.loads((folder / _SENTENCES).read_text())["max_seq_length"]))
    except (FileNotFoundError, KeyError):
        pass
    except (OSError, ValueError, TypeError) as error:
        raise CorruptCheckpoint(f"{folder / _SENTENCES} can not be read: {error}") from error
    return min(limits, default=None)


def _texts(checkpoint: ExpertCheckpoint, longest: int | None) -> TextPreparation:
    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # its files are untrusted, so transformers may raise anything
        raise CorruptCheckpoint(f"the tokenizer of {checkpoint.model} is not valid: {error}") from error
    if tokenizer.pad_token is None:
        raise CorruptCheckpoint(
            f"the tokenizer of {checkpoint.model} has no pad token, without which texts form no batch: name one in "
            "tokenizer_config.json"
        )
    own = tokenizer.model_max_length
    limits = [limit for limit in (longest, own if own < _NO_LIMIT else None) if limit is not None]
    return TextPreparation(tokenizer, min(limits, default=None))


def _digest(checkpoint: ExpertCheckpoint, names: Sequence[str], longest: int | None) -> str:
    total = xxhash.xxh3_128(f"{checkpoint.model_type} {checkpoint.task} {longest}".encode())
    for name in names:
        path = checkpoint.folder / name
        data = path.read_bytes() if path.exists() else b""
        total.update(f"{name} {len(data)}\n".encode() + data)
    return str(total.hexdigest())
