"""The pack that a model is served from, and what its experts are kept as in it."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import NamedTuple

from greenroom.core.errors import PackError
from greenroom.moe.formats.expert_format import ExpertFormat
from greenroom.moe.loading.checkpoint import Checkpoint
from greenroom.moe.loading.kept_format import kept_format, of_same_numbers, stays_in_bfloat16
from greenroom.moe.loading.packing import ensure_pack

log = logging.getLogger(__name__)


class KeptPack(NamedTuple):
    """``format``: of its records, but for layers that do not fit it. ``stands_in``: another format was preferred."""

    path: Path
    format: ExpertFormat
    stands_in: bool = False


def kept_pack(
    checkpoint: Checkpoint,
    dtype: str = "auto",
    experts_as: str = "auto",
    cache_dir: Path | None = None,
    *,
    products: str = "auto",
    device: str = "cpu",
    progress: bool | None = None,
    force: bool = False,
) -> KeptPack:
    """As ``ensure_pack`` and ``kept_format`` say.

    What "auto" prefers depends on the processor. So a cache from another machine may have a pack of the same numbers in
    another format, and be read-only, or its disk full. That pack is taken then, with a warning.
    """
    kept = kept_format(checkpoint, dtype, experts_as, products=products, device=device)
    stored = stays_in_bfloat16(checkpoint, dtype, experts_as, products=products, device=device)
    if stored is not None:
        log.warning(
            "experts are stored as %s, and numbers of %s are made of them, which take several times the memory: with "
            "--dtype bfloat16 they stay as they are", stored.name, checkpoint.stored_dtype
        )  # fmt: skip
    try:
        path = ensure_pack(checkpoint, dtype, cache_dir, progress=progress, force=force, expert_format=kept)
        return KeptPack(path, kept)
    except PackError as error:
        if experts_as != "auto" or force:
            raise
        for other in of_same_numbers(checkpoint, dtype):
            with contextlib.suppress(PackError):
                path = ensure_pack(checkpoint, dtype, cache_dir, progress=progress, expert_format=other, may_make=False)
                log.warning(
                    "experts stay %s, as %s has them, which may be slower than %s here: %s",
                    *(other.name, path, kept.name, error),
                )
                return KeptPack(path, other, stands_in=True)
        raise
