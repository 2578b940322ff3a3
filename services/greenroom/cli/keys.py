"""``greenroom keys``: who may use a gateway."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from greenroom.gateway.doors.keys import Key

F = TypeVar("F", bound=Callable[..., Any])


def _default_file() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "greenroom" / "keys.json"


def _keys_file(command: F) -> F:
    return click.option(
        "--keys-file",
        type=click.Path(dir_okay=False, path_type=Path),
        default=_default_file,
        envvar="GREENROOM_KEYS_FILE",
        help="The file of keys.  [default: ~/.config/greenroom/keys.json]",
    )(command)


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    The file holds hashes of the keys, so nobody can read a key out of it: it is shown once, when it is made. A gateway
    that was started with the same --keys-file takes a change within a second, without a restart.

    \b
    Examples:
      greenroom keys add ann
      greenroom keys add batch --rate-limit 60/min --max-concurrent 4 --token-limit 8192
      greenroom keys list
      greenroom keys revoke ann
    """


@keys.command()
@click.argument("name")
@click.option(
    "--rate-limit",
    help="Sequences a minute, such as 60 or 60/min: so many at once, then so many a minute. A request has n times its "
    "prompts of them.  [default: no limit]",
)
@click.option("--max-concurrent", type=int, help="Sequences at once.  [default: no limit]")
@click.option("--token-limit", type=int, help="Tokens of one request, prompt and answer.  [default: no limit]")
@click.option(
    "--max-priority",
    type=int,
    default=0,
    show_default=True,
    help="The highest that a request may ask for: -100 to 100.",
)
@_keys_file
def add(
    name: str,
    rate_limit: str | None,
    max_concurrent: int | None,
    token_limit: int | None,
    max_priority: int,
    keys_file: Path,
) -> None:
    """Make a key for NAME and print it; it is shown this once.

    Requests, limits and idempotency keys belong to the name: 1 to 64 letters, digits, '.', '_' and '-'.

    \b
    Examples:
      greenroom keys add ann
      greenroom keys add batch --rate-limit 60/min --max-concurrent 4
      KEY=$(greenroom keys add ci --keys-file ./keys.json)
    """
    from greenroom.gateway.doors.keys import KeyLimits, changing, new_key, utc_now, write_keys

    limits = KeyLimits(
        rate_per_minute=None if rate_limit is None else parse_rate(rate_limit),
        max_concurrent=max_concurrent,
        token_limit=token_limit,
        max_priority=max_priority,
    )
    key, text = new_key(name, limits, utc_now())
    with changing(keys_file) as present:
        write_keys(keys_file, present.add(key))
    click.echo(text)
    click.echo(f"the key of {name}, shown this once; it is taken by gateways with --keys-file {keys_file}", err=True)


@keys.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array.")
@_keys_file
def list_keys(as_json: bool, keys_file: Path) -> None:
    """Show all keys: names, ids, limits, and which are revoked. The keys themselves are not in the file.

    \b
    Examples:
      greenroom keys list
      greenroom keys list --json
    """
    from greenroom.gateway.doors.keys import read_keys

    found = read_keys(keys_file).keys
    if as_json:
        click.echo(json.dumps([_row(key) for key in found], indent=2))
        return
    columns = ("name", "id", "created", "revoked", "rate_limit", "max_concurrent", "token_limit", "max_priority")
    rows = [columns, *(tuple(_cell(_row(key)[column]) for column in columns) for key in found)]
    widths = [max(len(row[at]) for row in rows) for at in range(len(columns))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@keys.command()
@click.argument("name")
@_keys_file
def revoke(name: str, keys_file: Path) -> None:
    """Refuse the key of NAME from now on. The name may be given a new key afterwards.

    \b
    Examples:
      greenroom keys revoke ann
    """
    from greenroom.gateway.doors.keys import changing, read_keys, utc_now, write_keys

    read_keys(keys_file)  # a file that is not there is no empty one here
    with changing(keys_file) as present:
        write_keys(keys_file, present.revoke(name, utc_now()))
    click.echo(f"revoked the key of {name}", err=True)


def parse_rate(text: str) -> float:
    """``60``, ``60/min``, ``2/s``, ``600/h``. Raises BadParameter."""
    number, _, unit = text.replace(" ", "").partition("/")
    minutes = {"": 1.0, "min": 1.0, "m": 1.0, "s": 1 / 60, "h": 60.0}.get(unit)
    try:
        rate = float(number) / minutes if minutes is not None else 0.0
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise click.BadParameter(f"{text!r}: write requests a minute, such as 60 or 60/min", param_hint="--rate-limit")
    return rate


def _row(key: Key) -> dict[str, Any]:
    limits = key.limits
    return {
        "name": key.name,
        "id": key.id,
        "created": key.created.isoformat(),
        "revoked": None if key.revoked is None else key.revoked.isoformat(),
        "rate_limit": None if limits.rate_per_minute is None else f"{limits.rate_per_minute:g}/min",
        "max_concurrent": limits.max_concurrent,
        "token_limit": limits.token_limit,
        "max_priority": limits.max_priority,
    }


def _cell(value: object) -> str:
    return "-" if value is None else str(value)
