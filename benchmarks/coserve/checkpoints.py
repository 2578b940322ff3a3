"""The experts of the real runs: random checkpoints, made once and kept, and a definition of them.

They are as large as the paper's board wants them and know nothing. Experts of a role differ in their last layer, so
that to make one takes as long as to write it. Each has a file of its own, because `from_pretrained` is to find none of
it in the page cache on account of another one.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
import xxhash
from safetensors.torch import save_file

from benchmarks.coserve.boards import role_of
from benchmarks.coserve.costs import CROP_PIXELS, SHAPES, Shape
from benchmarks.harness.reporting.progress import each
from greenroom.coe.graph.definition_file import CoeDefinition
from greenroom.core.errors import GreenroomError
from greenroom.core.units import GIB, format_bytes

LABELS: Final = ("good", "broken")
DEFINITION: Final = "board.toml"
_SPARE: Final = 2 * GIB
"""Left free on the disk."""
_LAST: Final = "classifier.1.weight"


class NoRoom(GreenroomError):
    """The disk is too small for the experts of the real runs."""


def checkpoints(folder: Path, names: Sequence[str], *, others: int = 0) -> dict[str, Path]:
    """By name the folder of each expert, in ``folder``; those that are missing are made. ``names``: see ``role_of``.

    ``others``: bytes that the caller will write to the same disk beside them. Raises NoRoom before anything is written.
    """
    found = {name: folder / name for name in names}
    missing = [name for name, own in found.items() if not own.exists()]
    if missing or others:
        check_room(folder, sum(weight_bytes(role_of(name)) for name in missing) + others)
    for name in each(missing, "random experts", "expert"):
        _make(found[name], name)
    return found


def check_room(folder: Path, nbytes: int) -> None:
    """Raises NoRoom, which says what is needed, unless the disk of ``folder`` has it."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < nbytes + _SPARE:
        raise NoRoom(
            f"the experts and their pack take {format_bytes(nbytes)}, and {folder} has {format_bytes(free)} free, of "
            f"which {format_bytes(_SPARE)} are left alone: free some space, or name another disk with GREENROOM_CACHE"
        )


def weight_bytes(role: str) -> int:
    """Of one expert's weights."""
    return sum(tensor.nbytes for tensor in _weights(role).values())


def write_definition(file: Path, made: CoeDefinition, folders: Mapping[str, Path]) -> Path:
    """As `greenroom serve --coe` takes it. ``folders``: of the experts, by name."""
    parts = [f'name = "{made.name}"', "[router]", f'parameter = "{made.router.parameter}"', "[quantities]"]
    parts += [f'"{value}" = {quantity!r}' for value, quantity in made.quantities.items()]
    for name, expert in made.experts.items():
        parts += [f'[experts."{name}"]', f'model = "{folders[name].resolve()}"']
        for edge in expert.next:
            parts += [f'[[experts."{name}".next]]', f'expert = "{edge.expert}"']
    file.write_text("\n".join([*parts, ""]), encoding="utf-8")
    return file


def smaller(made: CoeDefinition, types: int) -> CoeDefinition:
    """The board's first types, with the detectors that follow them."""
    kept = list(made.quantities)[:types]
    names = [*kept, *_followers(made, kept)]
    return CoeDefinition(
        name=f"{made.name}-{types}",
        router=made.router,
        experts={name: made.experts[name] for name in names},
        quantities={name: made.quantities[name] for name in kept},
    )


def _followers(made: CoeDefinition, names: Collection[str]) -> Iterator[str]:
    found = {edge.expert for name in names for edge in made.experts[name].next}
    return (name for name in made.experts if name in found)


def _settings(shape: Shape) -> Any:
    from transformers import ResNetConfig

    return ResNetConfig(
        hidden_sizes=list(shape.widths), depths=list(shape.depths), layer_type=shape.layer_type,
        embedding_size=shape.stem, id2label=dict(enumerate(LABELS)),
    )  # fmt: skip


@cache
def _weights(role: str) -> dict[str, torch.Tensor]:
    from transformers import ResNetForImageClassification

    with torch.random.fork_rng():
        torch.manual_seed(xxhash.xxh3_64_intdigest(role.encode()) >> 1)
        model = ResNetForImageClassification(_settings(SHAPES[role]))
    return {name: tensor.contiguous() for name, tensor in model.state_dict().items()}


@cache
def _config(role: str) -> dict[str, Any]:
    settings = _settings(SHAPES[role])
    settings.architectures = ["ResNetForImageClassification"]
    settings.dtype = "float32"
    told: dict[str, Any] = json.loads(settings.to_json_string(use_diff=False))
    return told


def _make(folder: Path, name: str) -> None:
    """It appears whole or not at all."""
    from transformers import ViTImageProcessorPil

    role = role_of(name)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=folder.parent))
    try:
        weights = dict(_weights(role))
        own = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(name.encode()) >> 1)
        weights[_LAST] = torch.randn(weights[_LAST].shape, generator=own) / weights[_LAST].shape[-1] ** 0.5
        save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
        labels = [f"{name}: {label}" for label in LABELS]
        config = _config(role) | {
            "id2label": dict(enumerate(labels)), "label2id": {label: number for number, label in enumerate(labels)}
        }  # fmt: skip
        (draft / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        ViTImageProcessorPil(size={"height": CROP_PIXELS, "width": CROP_PIXELS}).save_pretrained(draft)
        draft.chmod(0o755)
        draft.replace(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
