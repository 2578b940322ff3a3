"""The options of a collaboration of experts, for the commands that serve one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from greenroom.cli.model_options import expert_policy, model_options
from greenroom.cli.option_stack import stack
from greenroom.cli.scheduling_options import parse_scheduling_options
from greenroom.core.errors import InvalidConfig
from greenroom.policies.registry import EXECUTOR_SCHEDULINGS, spelt

if TYPE_CHECKING:
    from greenroom.coe.serving.config import ServingConfig

DEMO = "demo"

coe_options = stack(
    click.option(
        "--coe",
        metavar="FILE|demo",
        help="Serve a collaboration of experts, a pipeline of whole models: its definition file, or `demo` for the "
        "bundled board. --scheduling then says how executors get their requests.",
    ),
    click.option(
        "--executors",
        type=int,
        help="With --coe: threads that compute.  [default: as profiled, else one a core, at most 4]",
    ),
    click.option(
        "--expert-share",
        type=float,
        help="With --coe: the experts' part of the memory that they and what batches compute get; --expert-memory is "
        "the experts'.  [default: as profiled, else batches get what the largest takes]",
    ),
    click.option(
        "--max-batch", type=int, help="With --coe: requests in a batch at most.  [default: 16, or as profiled]"
    ),
    click.option(
        "--max-pixels",
        type=int,
        help="With --coe: pixels of an image at most; larger ones are refused before they are decoded. Each executor's "
        "memory for images grows with it.  [default: 16000000]",
    ),
    click.option(
        "--one-memory/--memory-each",
        default=None,
        help="With --coe: one expert memory for all executors, or each its own.  [default: one with pull, else each]",
    ),
)
_ONLY = ("executors", "expert_share", "max_batch", "max_pixels", "one_memory")
_SHARED = {
    "expert_memory",
    "policy",
    "policy_options",
    "profile",
    "threads",
    "max_waiting",
    "dtype",
    "cache_dir",
    "offline",
}
"""Of the options that say how a model runs, those that say something of a collaboration too."""
_OF_MODELS = {
    "artifact_every",
    "forecast_every",
    "forecast_predictor",
    "forecast_timeout",
    "max_new_tokens",
    "max_prompt_tokens",
    "predictor",
    "state_dir",
    "task_type_extractor",
    "trace_rows",
    "trace_tokens",
    "traces",
}
"""Other options of the commands that serve either, which say nothing of a collaboration."""


def refuse_coe_options(options: dict[str, Any]) -> None:
    """Takes them out of ``options``. Without --coe they say nothing. Raises InvalidConfig."""
    options.pop("coe", None)
    for name in _ONLY:
        value = options.pop(name, None)
        if value is not None:
            raise InvalidConfig(name, value, "it is an option of a collaboration; name one with --coe")


def serving_config(options: dict[str, Any]) -> ServingConfig:
    """With --coe. Reads ``options``. Raises InvalidConfig, click.BadParameter."""
    from greenroom.coe.serving.config import ServingConfig
    from greenroom.coe.serving.selection import Selection
    from greenroom.demo.board import bundled_board_path

    _refuse_others()
    file = bundled_board_path() if options["coe"] == DEMO else Path(options["coe"])
    if not file.is_file():
        raise InvalidConfig("coe", options["coe"], "a definition file, or demo for the bundled board")
    if not _given("scheduling"):
        options = options | {"scheduling": EXECUTOR_SCHEDULINGS[0]}
    scheduling, scheduling_options = parse_scheduling_options(dict(options))
    policy = ""
    own: dict[str, Any] = {}
    if _given("policy"):
        policy, own = spelt("policy", options["policy"])
    if _given("policy_options"):
        own = own | dict(expert_policy(options | {"policy": None})[1])
    return ServingConfig(
        file=file,
        selection=Selection(scheduling, policy, scheduling_options, own, options["one_memory"]),
        expert_memory=options["expert_memory"],
        expert_share=options["expert_share"],
        executors=options["executors"],
        threads=options["threads"],
        most_batch=options["max_batch"],
        max_pixels=options["max_pixels"],
        profile=options["profile"],
        dtype=options["dtype"],
        cache_dir=options["cache_dir"],
        offline=options["offline"],
    )


def _refuse_others() -> None:
    """What was given and says nothing of a collaboration. Raises InvalidConfig."""
    context = click.get_current_context()
    own = {one.name for one in model_options(click.Command("any")).params}
    for name in sorted((own - _SHARED) | (_OF_MODELS & context.params.keys())):
        if _given(name):
            raise InvalidConfig(
                name, context.params[name], "it says nothing of a collaboration; leave it out with --coe"
            )


def _given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
