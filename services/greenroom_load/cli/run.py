"""``greenroom-load run``: one load, one report."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from greenroom_load.cli.options import LoadCommand, Options, load_options

DEFAULT_RATE = 2.0
DEFAULT_REQUESTS = 120
_OUT = click.Path(path_type=Path)


@click.command(cls=LoadCommand)
@click.option(
    "--request-rate",
    type=float,
    help=f"Requests a second on average; `inf` sends as soon as there is room.  "
    f"[default: {DEFAULT_RATE:g}, or the trace's]",
)
@load_options
@click.option("--json", "json_file", type=_OUT, help="Write all figures here, with the keys of vLLM's benchmark.")
@click.option("--save-detailed", is_flag=True, help="Arrays of all requests in that JSON too, as vLLM has them.")
@click.option("--save-requests", "requests_file", type=_OUT, help="Write a line of JSON for each request here.")
@click.option("--plot", "plot_prefix", type=_OUT, help="Draw PREFIX-latency.png and PREFIX-time.png.")
def run(
    request_rate: float | None,
    json_file: Path | None,
    save_detailed: bool,
    requests_file: Path | None,
    plot_prefix: Path | None,
    **given: Any,
) -> None:
    """Send one load and report latencies, throughput, goodput and errors.

    Open loop by default: a request is sent when its time comes, however the server fares. Without --num-requests,
    --duration or --trace it is 120 requests. Ctrl-C ends it and reports what there is.

    \b
    Examples:
      greenroom-load run --request-rate 4 --duration 60 --goodput ttft:500 tpot:50 --json result.json
      greenroom-load run --request-rate inf --max-concurrency 16 --num-requests 500
      greenroom-load run --task-mix summarise=0.4,question=0.6 --slo question=ttft:200,e2e:2000 --slo ttft:1000
      greenroom-load run --trace azure.csv --time-scale 0.2 --output-len trace --ignore-eos --duration 120
      greenroom-load run --url grpc://127.0.0.1:8001 --prompts mine.jsonl --save-requests requests.jsonl
    """
    from greenroom_load.plot import check_plots, draw
    from greenroom_load.report import check_writable, save_json, save_requests
    from greenroom_load.table import as_text

    options = Options(**given)
    check_writable(json_file, "json")
    check_writable(requests_file, "save-requests")
    if plot_prefix is not None:
        check_plots(plot_prefix)
    rate = request_rate if request_rate is not None or options.trace is not None else DEFAULT_RATE
    plan = options.plan(rate, options.prompts(), default_requests=DEFAULT_REQUESTS, default_duration_s=None)
    report = asyncio.run(options.session().run(plan))
    click.echo(as_text(report))
    found = report.as_json(detailed=save_detailed)
    if json_file is not None:
        save_json(found, json_file)
    if requests_file is not None:
        save_requests(report.outcome.records, requests_file)
    if plot_prefix is not None:
        for path in draw({report.setup.label or report.setup.model: found}, plot_prefix):
            click.echo(f"drawn: {path}", err=True)
    if report.outcome.interrupted:
        raise SystemExit(130)
    if not report.found.whole.completed:
        raise SystemExit(1)
