"""Options that are numbers take none that ends a command in a traceback."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from greenroom.cli import main
from greenroom.cli.numbers import NumberRange
from tests.pipeline.commands import complaint_of

SAMPLING = {"generate", "trace"}
"""Their seed is a request's, which may be negative."""


def options(group: click.Group = main) -> Iterator[tuple[str, click.Option]]:
    """Of every command that is no group, with its name."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from options(command)
        else:
            yield from ((name, one) for one in command.params if isinstance(one, click.Option))


@pytest.mark.parametrize("seed", ["-1", str(2**64)])
@pytest.mark.parametrize("command", ["paths", "reuse", "path", "residual", "expert-mlp"])
def test_a_seed_that_none_can_draw_by_is_refused(command: str, seed: str) -> None:
    said = complaint_of(command, "fit", "--seed", seed)
    assert "'--seed'" in said
    assert "not in the range" in said


def test_every_seed_and_every_range_is_checked() -> None:
    seeds = [(name, one.type) for name, one in options() if one.name == "seed" and name not in SAMPLING]
    assert len(seeds) > 8
    for name, kind in seeds:
        assert isinstance(kind, click.IntRange), name
        assert kind.min == 0, name
    for name, one in options():
        assert not isinstance(one.type, click.FloatRange) or isinstance(one.type, NumberRange), (name, one.name)


def test_a_range_takes_no_nan() -> None:
    for option in ("--held-out", "--seconds"):
        assert "nan is no number" in complaint_of("paths", "fit", option, "nan")


def test_a_range_takes_what_is_in_it() -> None:
    @click.command()
    @click.option("--share", type=NumberRange(0, 0.9))
    def command(share: float | None) -> None:
        click.echo(repr(share))

    assert CliRunner().invoke(command, ["--share", "0.5"]).output == "0.5\n"
    assert CliRunner().invoke(command, []).output == "None\n"
    assert CliRunner().invoke(command, ["--share", "1"]).exit_code == 2
