"""greenroom's command line in this process."""

from __future__ import annotations

import click
from click.testing import CliRunner, Result

from greenroom.cli import main


def result_of(*arguments: str, text: str | None = None, status: int = 0) -> Result:
    """With ``text`` on its standard input; it ends with ``status``, and never with a traceback."""
    result = CliRunner().invoke(main, arguments, input=text, catch_exceptions=False)
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result


def output_of(*arguments: str, text: str | None = None, status: int = 0) -> str:
    """All that it said."""
    return result_of(*arguments, text=text, status=status).output


def complaint_of(*arguments: str, text: str | None = None) -> str:
    """What it said of a mistake: of how it was called, by status 2, or of what it was given, by status 1."""
    result = CliRunner().invoke(main, arguments, input=text, catch_exceptions=False)
    assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    return result.stderr


def commands(group: click.Group = main, above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every command that is no group of commands."""
    found: list[tuple[str, ...]] = []
    for name, command in group.commands.items():
        words = (*above, name)
        found += commands(command, words) if isinstance(command, click.Group) else [words]
    return found
