"""`--trace-tokens`: off unless it is asked for, and refused where it would do nothing."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from greenroom.cli.main import main
from greenroom.cli.worker import _service_config, worker
from greenroom.worker.model.config import WorkerConfig


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["worker", "--traces", "off", "--trace-tokens"], "--traces on or auto"),
        (["serve", "--policy", "lru", "--trace-tokens"], "else nothing is traced"),
    ],
)
def test_where_nothing_is_traced_it_is_refused(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert "trace_tokens" in result.output
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("arguments", "environment", "told"),
    [([], {}, False), (["--trace-tokens"], {}, True), ([], {"GREENROOM_WORKER_TRACE_TOKENS": "1"}, True)],
)
def test_tokens_are_told_only_where_that_is_said(
    arguments: list[str], environment: dict[str, str], told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = worker.make_context("worker", arguments, auto_envvar_prefix="GREENROOM_WORKER").params
    config = _service_config("w", WorkerConfig("m"), options, all_fit=False)
    assert config.traces.tells_tokens is told
    fits = _service_config("w", WorkerConfig("m"), options, all_fit=True)
    assert not fits.traces.tells_tokens
    assert (config.forecasts.every, fits.forecasts.every) == (40, 0), "where all fit nobody needs a forecast"
