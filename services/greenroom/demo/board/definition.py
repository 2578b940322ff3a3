"""The definition file of a board's experts, as docs/architecture/coe.md describes it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Final

from greenroom.demo.board.component_types import GOOD, ComponentType
from greenroom.demo.board.expert_crops import Expert

PARAMETER: Final = "component"
FOLDER: Final = "experts"


def definition_text(types: Sequence[ComponentType], experts: Iterable[Expert]) -> str:
    """TOML. A request's first expert is that of its component's type; good ones of some types go on to a shared one."""
    lines = [
        'name = "board"',
        "",
        "[router]",
        f"parameter = {json.dumps(PARAMETER)}",
        "",
        "[router.first]",
        *(f"{value} = {json.dumps(one.name)}" for one in types for value in one.values),
        "",
        "[quantities]  # of each value on one board",
        *(f"{value} = {many}" for one in types for value, many in one.values.items()),
    ]
    after = {one.name: one for one in types}
    for expert in experts:
        lines += ["", f"[experts.{expert.name}]", f'model = "{FOLDER}/{expert.name}"']
        type_ = after.get(expert.name)
        if type_ is not None and type_.orientation is not None:
            lines += [
                f"[[experts.{expert.name}.next]]",
                f"expert = {json.dumps(type_.orientation)}",
                f"label = {json.dumps(GOOD)}",
                f"probability = {type_.good}",
            ]
    return "\n".join(lines) + "\n"
