"""greenroom's command line in this process."""

from __future__ import annotations

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
