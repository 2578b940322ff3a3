"""What callers of ``greenroom.v1`` rely on, as plain text, and which changes would break them."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor

import greenroom.v1

Interface = dict[str, dict[str, dict[str, str]]]
"""kind (messages, enums, services) → full name → number or method → what stands there."""

SNAPSHOT = Path(__file__).with_name("v1.json")
HOW = (
    "Callers of version 1 would break. Leave it as it is and add a field, value or method beside it; where that does "
    "not do, copy proto/greenroom/v1 to proto/greenroom/v2, change it there, and serve both until v1 has no callers."
)
_TYPES = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in vars(FieldDescriptor).items()
    if name.startswith("TYPE_")
}


def described() -> Interface:
    """The interface as the generated modules have it."""
    interface: Interface = {"messages": {}, "enums": {}, "services": {}}
    for module in pkgutil.iter_modules(greenroom.v1.__path__):
        if module.name.endswith("_pb2"):
            _add_file(interface, importlib.import_module(f"greenroom.v1.{module.name}").DESCRIPTOR)
    return interface


def breaks(before: Interface, now: Interface) -> list[str]:
    """What of ``before`` is not in ``now`` as it was, one line each, and last what to do; empty if nothing is."""
    lines = []
    for kind, names in before.items():
        for name, parts in names.items():
            if name not in now[kind]:
                lines.append(f"{kind[:-1]} {name} is gone")
                continue
            for part, text in parts.items():
                at = f"{name} {part}" if kind != "services" else f"{name}.{part}"
                present = now[kind][name].get(part)
                if present is None:
                    lines.append(f"{at} is gone: it was `{text}`")
                elif present != text:
                    lines.append(f"{at} was `{text}` and is `{present}`")
    return [*lines, HOW] if lines else []


def load(path: Path) -> Interface:
    interface: Interface = json.loads(path.read_text(encoding="utf-8"))
    return interface


def save(path: Path, interface: Interface) -> None:
    path.write_text(json.dumps(interface, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _add_file(interface: Interface, file: FileDescriptor) -> None:
    for message in file.message_types_by_name.values():
        _add_message(interface, message)
    for enum in file.enum_types_by_name.values():
        _add_enum(interface, enum)
    for service in file.services_by_name.values():
        interface["services"][service.full_name] = {
            method.name: f"{_stream(method.client_streaming)}{method.input_type.full_name} -> "
            f"{_stream(method.server_streaming)}{method.output_type.full_name}"
            for method in service.methods
        }


def _add_message(interface: Interface, message: Descriptor) -> None:
    interface["messages"][message.full_name] = {str(field.number): _field(field) for field in message.fields}
    for nested in message.nested_types:
        _add_message(interface, nested)
    for enum in message.enum_types:
        _add_enum(interface, enum)


def _add_enum(interface: Interface, enum: EnumDescriptor) -> None:
    interface["enums"][enum.full_name] = {str(value.number): value.name for value in enum.values}


def _field(field: FieldDescriptor) -> str:
    kind = _TYPES[field.type]
    if field.message_type is not None:
        kind = field.message_type.full_name
    elif field.enum_type is not None:
        kind = field.enum_type.full_name
    oneof = field.containing_oneof
    if field.is_repeated:
        return f"repeated {kind} {field.name}"
    if oneof is None:
        return f"{kind} {field.name}"
    if oneof.name == f"_{field.name}":  # how `optional` is written in a descriptor
        return f"optional {kind} {field.name}"
    return f"{kind} {field.name} of oneof {oneof.name}"


def _stream(streaming: bool) -> str:
    return "stream " if streaming else ""
