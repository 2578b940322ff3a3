"""What experts are measured with: a user's own samples, or random inputs as large as a checkpoint takes them."""

from __future__ import annotations

import io
import json
import random
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from greenroom.coe.computing.inputs import Input, image_preparation
from greenroom.coe.loading.expert_checkpoint import ExpertCheckpoint, InputKind
from greenroom.core.errors import InvalidConfig

IMAGE_SUFFIXES: Final = (".png", ".jpg", ".jpeg")
MOST: Final = 4096
"""So many samples are read at most, in the order of their names or lines."""
DISTINCT: Final = 16
"""So many random inputs are made; larger batches repeat them."""
_UNKNOWN_WORDS: Final = 128
_LINE: Final = 'a line is {"file": "NAME.png"} or {"text": "…"}, with "experts": [names] where they are known'


@dataclass(frozen=True, slots=True)
class Samples:
    """``images`` and ``texts``: as they would come. ``paths``: of those that say so, the experts they go through."""

    images: tuple[bytes, ...] = field(default=(), repr=False)
    texts: tuple[str, ...] = field(default=(), repr=False)
    paths: tuple[tuple[str, ...], ...] = ()

    def of(self, kind: InputKind) -> Sequence[Input]:
        return self.images if kind is InputKind.IMAGE else self.texts


def read_samples(path: Path) -> Samples:
    """A folder of images (PNG, JPEG), a file of texts, one a line, or JSON Lines as ``greenroom coe demo`` writes them.

    Raises InvalidConfig, naming what can not be read.
    """
    try:
        if path.is_dir():
            files = sorted(one for one in path.iterdir() if one.suffix.lower() in IMAGE_SUFFIXES)[:MOST]
            found = Samples(images=tuple(one.read_bytes() for one in files))
        elif path.suffix.lower() == ".jsonl":
            found = _json_lines(path)
        else:
            lines = path.read_text(encoding="utf-8").splitlines()
            found = Samples(texts=tuple(line for line in lines if line.strip())[:MOST])
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(path, f"it can not be read: {error}") from error
    if not (found.images or found.texts):
        raise _bad(path, "it has no samples: name a folder of PNG or JPEG images, a file of texts, or JSON Lines")
    return found


def _json_lines(path: Path) -> Samples:
    images: list[bytes] = []
    texts: list[str] = []
    paths: list[tuple[str, ...]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:MOST], start=1):
        try:
            row = json.loads(line)
            if "file" in row:
                images.append((path.parent / row["file"]).read_bytes())
            else:
                texts.append(str(row["text"]))
            if "experts" in row:
                paths.append(tuple(map(str, row["experts"])))
        except (ValueError, KeyError, TypeError) as error:
            raise _bad(path, f"line {number}: {_LINE} ({error!r})") from error
    return Samples(tuple(images), tuple(texts), tuple(paths))


def inputs_of(checkpoint: ExpertCheckpoint, samples: Samples | None, longest: int | None, seed: int) -> Sequence[Input]:
    """What an expert's batches are made of, in turn: the samples of its kind, else random ones.

    ``longest``: tokens that a text may have. Random images are those of which its processor makes the most pixels, all
    of one size, so that they are computed together and a batch takes the most memory that it may take. Raises
    CorruptCheckpoint.
    """
    if samples is not None and (own := samples.of(checkpoint.takes)):
        return own
    if checkpoint.takes is InputKind.IMAGE:
        return random_images(*image_preparation(checkpoint).largest, DISTINCT, seed)
    return random_texts(longest or _UNKNOWN_WORDS, DISTINCT, seed)


def random_images(width: int, height: int, many: int, seed: int) -> list[bytes]:
    """PNG files of coloured blocks: noise would take longer to decode than pictures do."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(many):
        blocks = rng.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(blocks).resize((width, height), Image.Resampling.BILINEAR).save(buffer, format="PNG")
        made.append(buffer.getvalue())
    return made


def random_texts(words: int, many: int, seed: int) -> list[str]:
    """Texts of so many words of one to eight letters."""
    lots = random.Random(seed)
    return [
        " ".join("".join(lots.choices(string.ascii_lowercase, k=lots.randint(1, 8))) for _ in range(words))
        for _ in range(many)
    ]


def _bad(path: Path, allowed: str) -> InvalidConfig:
    return InvalidConfig("samples", str(path), allowed)
