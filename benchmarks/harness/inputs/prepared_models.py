"""The models that arms run on, each made ready by a child process: checkpoint, pack, prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.children.processes import Children, ChildSpec
from benchmarks.harness.inputs.token_streams import Stream, random_stream, task_stream

BUNDLED, WIDENED, RANDOM = "bundled", "widened", "random"
LARGE, LONG = "large", "long"
MODELS = (WIDENED, RANDOM, BUNDLED)
ALL_MODELS = (*MODELS, LONG, LARGE)
"""The last two only where they are asked for: prompts of 8,000 tokens, and a model that takes 27 GiB of disk."""

_LONG_PROMPTS, _LONG_TOKENS = 2, 8000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """``prompts``: of a stream; ``bundled_prompts``: of the small model's, so that eight run at once for most of it.

    ``random_tokens``, ``large_tokens``: generated for each prompt of the models of random weights. MiB are those of an
    expert.
    """

    prompts: int = 8
    bundled_prompts: int = 24
    random_tokens: int = 16
    large_tokens: int = 32
    widened_mib: float = 11.0
    random_mib: float = 21.0


QUICK_SIZES = Sizes(prompts=4, bundled_prompts=8, random_tokens=4, widened_mib=1.0, random_mib=1.0)


@dataclass(frozen=True)
class PreparedModel:
    """A checkpoint that is ready. ``cold``: its files, to be dropped from the page cache before a bounded turn."""

    name: str
    folder: Path
    stream: Stream
    cold: tuple[Path, ...]
    checkpoint_bytes: int


def prepare(children: Children, name: str, sizes: Sizes, offload_folder: Path | None = None) -> PreparedModel:
    """Make the model of that name, and write its weights into ``offload_folder`` as accelerate reads them.

    Ends all other children. Raises ArmFailed.
    """
    mib = sizes.widened_mib if name == WIDENED else sizes.random_mib
    settings: dict[str, Any] = {"model": name, "expert_mib": mib}
    if offload_folder is not None:
        settings["offload_folder"] = str(offload_folder)
    ready = children.get(ChildSpec.of("prepare", settings)).description
    children.close_all_but()
    folder = Path(ready["folder"])
    if name == LONG:
        stream = random_stream(
            ready["vocabulary"], _LONG_PROMPTS, prompt_tokens=_LONG_TOKENS, tokens=sizes.random_tokens
        )
    elif name in (RANDOM, LARGE):
        tokens = sizes.random_tokens if name == RANDOM else sizes.large_tokens
        stream = random_stream(ready["vocabulary"], sizes.prompts, tokens=tokens)
    else:
        stream = task_stream(folder, sizes.bundled_prompts if name == BUNDLED else sizes.prompts)
    return PreparedModel(name, folder, stream, (folder, Path(ready["pack"])), int(ready["checkpoint_bytes"]))
