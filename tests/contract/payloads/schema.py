"""What the payloads look like, as data: to compare with what was promised.

``python -m tests.contract.payloads.schema`` prints the present state.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

import msgspec
from msgspec import inspect

from greenroom.core.messages import (
    Cancel,
    Claim,
    DeadLetter,
    Inference,
    Lost,
    Member,
    Outcome,
    Rejected,
    Request,
    Task,
    Trace,
)

MESSAGES = (Request, Inference, Cancel, Task, Rejected, Claim, Lost, Outcome, Trace, DeadLetter, Member)
Schema = dict[str, Any]


def present() -> Schema:
    """Every message and every type within, by name: its fields in order, with type and whether they must be there."""
    found: Schema = {}
    for message in MESSAGES:
        _name(inspect.type_info(message), found)
    return dict(sorted(found.items()))


def breaks(promised: Schema, now: Schema) -> list[str]:
    """What of ``now`` a reader or writer of ``promised`` would stumble over."""
    problems = []
    for name, old in promised.items():
        new = now.get(name)
        if new is None:
            problems.append(f"{name} is gone")
            continue
        problems += [
            f"{name}: {key} was {old[key]!r}, is {new[key]!r}" for key in ("tag", "array") if old[key] != new[key]
        ]
        problems += _fields(name, old, new, records={each for each, one in now.items() if one["tag"] is not None})
    return problems


def _fields(name: str, old: Schema, new: Schema, records: Collection[str]) -> list[str]:
    problems = []
    for field, was in old["fields"].items():
        now = new["fields"].get(field)
        if now is None:
            problems.append(f"{name}.{field} is gone")
        elif now["type"] != was["type"] and not _more_records(was["type"], now["type"], records):
            problems.append(f"{name}.{field} was {was['type']}, is {now['type']}")
        elif now["required"] and not was["required"]:
            problems.append(f"{name}.{field} must be there now")
        elif was["required"] and not now["required"]:
            problems.append(f"{name}.{field} may be absent now, and readers of before need it")
        elif now["default"] != was["default"]:
            problems.append(f"{name}.{field} meant {was['default']} where it is absent, means {now['default']}")
    problems += [
        f"{name}.{field} is new and has no default"
        for field, now in new["fields"].items()
        if field not in old["fields"] and now["required"]
    ]
    kept = [field for field in new["fields"] if field in old["fields"]]
    if old["array"] and list(new["fields"])[: len(kept)] != list(old["fields"]):
        problems.append(f"{name} is an array: new fields go to its end")
    return problems


def _more_records(was: str, now: str, records: Collection[str]) -> bool:
    """Whether further kinds of record may stand there now. As with a new kind in a topic, readers run first."""
    before, after = set(was.split(" | ")), set(now.split(" | "))
    return before < after and after <= set(records)


def _name(kind: inspect.Type, found: Schema) -> str:
    """How the type is written, types with fields by their name, which are put into ``found``."""
    match kind:
        case inspect.Metadata():
            return _name(kind.type, found)
        case inspect.StructType() | inspect.DataclassType():
            name = kind.cls.__name__
            if name not in found:
                found[name] = {
                    "tag": getattr(kind, "tag", None),
                    "array": getattr(kind, "array_like", False),
                    "fields": {},
                }
                for field in kind.fields:
                    found[name]["fields"][field.encode_name] = {
                        "type": _name(field.type, found),
                        "required": field.required,
                        "default": None if field.required else _default(field),
                    }
            return name
        case inspect.UnionType():
            return " | ".join(sorted(_name(one, found) for one in kind.types))
        case inspect.VarTupleType() | inspect.ListType():
            return f"array[{_name(kind.item_type, found)}]{_limits(kind)}"
        case inspect.TupleType():
            return f"array({', '.join(_name(one, found) for one in kind.item_types)})"
        case inspect.EnumType():
            return " | ".join(sorted(repr(str(one.value)) for one in kind.cls))
        case inspect.LiteralType():
            return " | ".join(sorted(map(repr, kind.values)))
        case _:
            return type(kind).__name__.removesuffix("Type").lower() + _limits(kind)


def _default(field: inspect.Field) -> str:
    return repr(field.default_factory() if field.default is msgspec.NODEFAULT else field.default)


def _limits(kind: inspect.Type) -> str:
    limits = {
        key: value
        for key in ("gt", "ge", "lt", "le", "multiple_of", "min_length", "max_length", "pattern")
        if (value := getattr(kind, key, None)) is not None
    }
    return f"({', '.join(f'{key}={value}' for key, value in limits.items())})" if limits else ""


def as_text(schema: Schema) -> str:
    return json.dumps(schema, indent=1) + "\n"


if __name__ == "__main__":
    sys.stdout.write(as_text(present()))
