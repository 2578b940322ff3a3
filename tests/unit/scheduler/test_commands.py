"""What ``greenroom scheduler`` refuses before it starts, and says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from greenroom.cli.main import main


def run(*args: str, **env: str) -> str:
    result = CliRunner().invoke(main, ["scheduler", *args], env=env, auto_envvar_prefix="GREENROOM")
    assert result.exit_code != 0
    return result.output + (str(result.exception) if result.exception is not None else "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{", "this is no JSON"),
        ("[1]", "write a JSON object"),
        ('{"estimator": "crystal ball"}', "known: eq3, processor-sharing"),
        ('{"late_share": 3}', "a share from 0 to 1"),
        ('{"pace": 1}', "known: estimator, late_share, margin, patience_s"),
    ],
)
def test_bad_options_are_refused_with_what_is_allowed(options: str, said: str) -> None:
    assert said in run("--scheduling", "emoe", "--scheduling-options", options)


def test_options_are_read_from_the_environment_too() -> None:
    said = run(GREENROOM_SCHEDULER_SCHEDULING="emoe", GREENROOM_SCHEDULER_SCHEDULING_OPTIONS='{"margin": 0}')
    assert "margin: 0 is not allowed" in said


def test_a_profile_that_is_none_is_named(tmp_path: Path) -> None:
    other = tmp_path / "profile.json"
    other.write_text("{}")
    assert "greenroom profile" in run("--profile", str(other))
    assert "No such file" in run("--profile", str(tmp_path / "nowhere"))


def test_the_help_has_examples() -> None:
    result = CliRunner().invoke(main, ["scheduler", "--help"])
    assert "--scheduling emoe --profile profile.json" in result.output
