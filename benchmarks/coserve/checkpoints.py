"""The experts of the real runs: random checkpoints, made once and kept, and a definition of them."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks.coserve.boards import role_of
from benchmarks.coserve.random_experts import save_expert, weight_bytes
from benchmarks.harness.reporting.progress import each
from greenroom.coe.graph.definition_file import CoeDefinition
from greenroom.core.errors import GreenroomError
from greenroom.core.units import GIB, format_bytes

DEFINITION: Final = "board.toml"
_SPARE: Final = 2 * GIB
"""Left free on the disk."""


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
        save_expert(found[name], role_of(name))
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
