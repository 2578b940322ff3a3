"""``greenroom-load sweep``: the same load at several rates, and which of them are sustained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.core.errors import InvalidConfig
from greenroom_load.cli.options import LoadCommand, Options, load_options

if TYPE_CHECKING:
    from greenroom_load.plan import Plan
    from greenroom_load.sweep import Step

DEFAULT_DURATION_S = 30.0
_OUT = click.Path(path_type=Path)


@click.command(cls=LoadCommand)
@click.option("--rates", metavar="R,R,...", help="Requests a second.  [default: they are searched for]")
@click.option("--start-rate", type=float, default=1.0, show_default=True, help="Where the search begins.")
@click.option("--max-rate", type=float, default=1000.0, show_default=True, help="Where it ends at most.")
@click.option("--precision", type=float, default=0.1, show_default=True, help="How close it comes, as a share.")
@click.option(
    "--most-failed", type=float, default=0.01, show_default=True, help="Sustained: share of failures at most."
)
@click.option(
    "--least-finished",
    type=float,
    default=0.95,
    show_default=True,
    help="Sustained: as many finished as were to be sent, at least this share.",
)
@click.option("--least-good", type=float, default=0.9, show_default=True, help="Sustained: share within --goodput.")
@click.option("--pause", type=click.FloatRange(min=0), default=1.0, show_default=True, help="Seconds between rates.")
@load_options
@click.option("--json", "json_file", type=_OUT, help="Write all figures here: those of `run` for each rate.")
@click.option("--plot", "plot_prefix", type=_OUT, help="Draw PREFIX-rate.png.")
def sweep(
    rates: str | None,
    start_rate: float,
    max_rate: float,
    precision: float,
    most_failed: float,
    least_finished: float,
    least_good: float,
    pause: float,
    json_file: Path | None,
    plot_prefix: Path | None,
    **given: Any,
) -> None:
    """Send the same load at several rates and say which of them the server sustains.

    Without --rates the saturating rate is searched for: from --start-rate it doubles until a rate is not sustained,
    then the interval is halved until its ends are within --precision. A rate is sustained if at most --most-failed of
    its requests failed, if in the second half of the sending time at least --least-finished as many ended as were to
    be sent, and if, with --goodput, at least --least-good were within it. 30 s a rate unless --duration or
    --num-requests says otherwise; a trace is sped up or slowed down to each rate.

    \b
    Examples:
      greenroom-load sweep --duration 30 --json sweep.json
      greenroom-load sweep --rates 1,2,4,8,16 --goodput ttft:500 tpot:50 --plot load
      greenroom-load sweep --trace azure.csv --start-rate 0.5 --precision 0.05
    """
    from greenroom_load.plot import check_plots, draw
    from greenroom_load.report import check_writable, save_json
    from greenroom_load.sweep import Rule, Search, parse_rates

    options = Options(**given)
    if options.max_concurrency is not None:
        raise InvalidConfig("max_concurrency", options.max_concurrency, "for `run`: a sweep's loop is open")
    check_writable(json_file, "json")
    if plot_prefix is not None:
        check_plots(plot_prefix)
    rule = Rule(most_failed=most_failed, least_finished=least_finished, least_good=least_good)
    wanted = Search(start=start_rate, most=max_rate, precision=precision) if rates is None else parse_rates(rates)

    prompts = options.prompts()  # each rate goes on where the one before ended: no cache of prompts has seen them

    def plan_at(rate: float) -> Plan:
        return options.plan(rate, prompts, default_requests=None, default_duration_s=DEFAULT_DURATION_S)

    plan_at(start_rate)  # what is wrong with it should be said before the server is waited for
    found = asyncio.run(options.session().sweep(plan_at, wanted, rule, pause_s=pause, on_step=_tell))
    click.echo(found.as_text())
    as_json = found.as_json()
    if json_file is not None:
        save_json(as_json, json_file)
    if plot_prefix is not None and found.steps:
        for path in draw({options.label or "sweep": as_json}, plot_prefix):
            click.echo(f"drawn: {path}", err=True)
    if found.interrupted:
        raise SystemExit(130)


def _tell(step: Step) -> None:
    verdict = "sustained" if step.sustained else "not sustained: " + "; ".join(step.broken)
    click.echo(f"{step.rate:.4g}/s: {verdict}", err=True)
