"""The options that say which model runs and on what; the same for every command that runs one."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from greenroom.cli.artifact_options import artifact_options
from greenroom.cli.option_stack import F, stack
from greenroom.demo import bundled_model_path

if TYPE_CHECKING:
    from greenroom.worker.model.config import WorkerConfig

log = logging.getLogger(__name__)


def _rows(text: int | str) -> int | str:
    """Raises click.BadParameter."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise click.BadParameter(f"{text!r}: write a number of rows, or auto") from None


experts_as_option = click.option(
    "--experts-as",
    default="auto",
    show_default=True,
    help="Experts in packs and memory. Quantised ones: stored (as the checkpoint has them), expanded (to --dtype), or "
    "auto (as stored where the compiled products take them so). In bfloat16: lossless (three quarters of the bytes "
    "or less, the same numbers), expanded (as they are), or auto (lossless on processors where that is faster). "
    "lossless-planes and lossless-codes make a pack for another processor: one with AVX512_BF16 and VBMI2, any other.",
)

dense_as_option = click.option(
    "--dense-as",
    default="auto",
    show_default=True,
    help="Quantised linear layers outside the experts (attention, shared experts, head) in memory: stored, expanded, "
    "or auto, as for --experts-as. Stored ones take half to a quarter of the memory, answers of few rows come faster, "
    "prompts slower. Codes that the compiled products do not know become numbers either way.",
)

device_option = click.option(
    "--device",
    default="auto",
    show_default=True,
    help="What to compute on: cpu, cuda, or auto (a GPU where there is one).",
)

products_option = click.option(
    "--products",
    default="auto",
    show_default=True,
    help="Matrix products: native (compiled, bf16 on a CPU), torch (to the bit as transformers), or auto.",
)

computing_options = stack(device_option, products_option)
"""What it will be computed by, for commands that only prepare it: the defaults of ``--experts-as`` and ``--dense-as``
go by that."""

checkpoint_options = stack(
    click.option("--revision", help="Branch, tag or commit of a model on the hub."),
    click.option("--offline", is_flag=True, help="Use only what was downloaded before; no network."),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        help="What the weights are computed in: auto (the checkpoint's), bfloat16, float16, float32.",
    ),
    experts_as_option,
    click.option(
        "--cache-dir",
        type=click.Path(file_okay=False, path_type=Path),
        envvar="GREENROOM_CACHE",
        help="Where expert packs are kept.  [default: ~/.cache/greenroom]",
    ),
)

runtime_options = stack(
    device_option,
    dense_as_option,
    click.option(
        "--expert-memory",
        default="auto",
        show_default=True,
        help="Memory for experts: auto (what the machine allows), a size such as 2GiB, or a share such as 25%.",
    ),
    click.option("--host-memory", default="auto", show_default=True, help="A tier between disk and device, likewise."),
    click.option("--kv-memory", default="auto", show_default=True, help="Memory for keys and values: auto or a size."),
    click.option(
        "--policy",
        default="duoserve",
        show_default=True,
        help="Who stays, leaves, is fetched ahead: duoserve, look-ahead, reuse, next-use, emoe, moe-infinity, lru and "
        "others (docs/architecture/policies.md); with options as in duoserve:literal=true. Of a collaboration: pull, "
        "coserve, lru, lfu, fifo or decayed, by default that of --scheduling.",
    ),
    click.option("--policy-options", default="{}", show_default=True, help="Options of the policy, as JSON."),
    click.option(
        "--fidelity",
        default="exact",
        show_default=True,
        help="An expert that is not in memory: exact (load it), sensitive (load it where the task is sensitive to the "
        "layer, else go on with those in memory), paper (always go on with those in memory).",
    ),
    click.option(
        "--await-target/--no-await-target",
        default=True,
        show_default=True,
        help="With sensitive and paper: a layer waits until those of its experts that the policy has just decided to "
        "keep have come, else it goes on without them meanwhile.",
    ),
    click.option(
        "--profile",
        type=click.Path(dir_okay=False, path_type=Path),
        help="What `greenroom profile` measured of the model by task type.  [default: profile.json in its folder]",
    ),
    artifact_options,
    click.option(
        "--residual",
        type=click.Path(dir_okay=False, path_type=Path),
        help="What `greenroom residual fit` made: foresees picks in the place of routers run ahead.  "
        "[default: residual.safetensors in its folder]",
    ),
    click.option("--attention", default="auto", show_default=True, help="auto, sdpa, or eager."),
    products_option,
    click.option(
        "--compiled-rows",
        default="auto",
        show_default=True,
        help="Most rows that compiled products are taken for: measure, auto (measure where the processor multiplies "
        "bf16 itself, else any), a number, or PRODUCT,DECODE,PROMPT.",
    ),
    click.option(
        "--batch-invariant",
        is_flag=True,
        help="No text depends on what is generated beside it, also where torch's products of many rows are faster. "
        "Without it the start says whether any does.",
    ),
    click.option("--max-model-len", type=int, help="Tokens of prompt and answer.  [default: the model's own]"),
    click.option(
        "--batching",
        default="fcfs",
        show_default=True,
        help="Which rows form a step: fcfs (prompts in chunks), phases (prompts whole and together, while moving "
        "experts takes longer than computing; no --prefill-chunk), or token-scheduler (decode rows that share experts "
        "together, under --rows-per-forward); with options as in phases:hold=0.25.",
    ),
    click.option("--max-running", type=int, default=32, show_default=True, help="Requests running at once."),
    click.option("--max-waiting", type=int, default=256, show_default=True, help="Requests waiting at most."),
    click.option(
        "--tokens-per-step",
        type=_rows,
        metavar="ROWS|auto",
        default=512,
        show_default=True,
        help="Rows in one forward; auto: 512, or more where the batch policy runs prompts whole, at what the memory "
        "plan says.",
    ),
    click.option(
        "--prefill-chunk",
        type=int,
        default=256,
        show_default=True,
        help="Most rows of one prompt in it, unless the batch policy runs prompts whole.",
    ),
    click.option(
        "--rows-per-forward",
        type=int,
        help="Most decode rows in one forward; where more requests decode, they run in several.  [default: all]",
    ),
    click.option("--threads", type=int, help="Cores to compute on.  [default: all that are usable]"),
    click.option(
        "--warm-start/--cold-start", default=True, show_default=True, help="Begin with the experts of last time."
    ),
)

model_option = click.option(
    "--model", help="A folder, a GGUF file, or a model id on the hub.  [default: the bundled model]"
)


def model_options(command: F) -> F:
    """All of them."""
    return model_option(checkpoint_options(runtime_options(command)))


def worker_config(options: dict[str, Any]) -> WorkerConfig:
    """Takes the options of ``model_options`` out of ``options``. Raises InvalidConfig, click.BadParameter."""
    from greenroom.core.artifacts.artifact_kinds import ARTIFACT_FILES
    from greenroom.core.artifacts.residual_file import ResidualFile
    from greenroom.text.hub import local_folder
    from greenroom.worker.model.config import WorkerConfig
    from greenroom.worker.model.files_beside import files_beside

    known = {field.name for field in fields(WorkerConfig)}
    policy, policy_options = expert_policy(options)
    chosen = {name: options.pop(name) for name in list(options) if name in known}
    chosen["policy_options"] = policy_options
    if policy is not None:
        chosen["policy"] = policy
    if chosen["model"] is None:
        chosen["model"] = str(bundled_model_path())
        chosen["served_model_name"] = chosen.get("served_model_name") or "greenroom-understudy"
    folder = local_folder(chosen["model"], chosen.get("revision"))
    if folder is not None:
        given = {name for name, value in chosen.items() if value is not None}
        beside = files_beside(folder, policy or "", policy_options, given, batching=chosen.get("batching", "fcfs"))
        chosen |= beside | {"found_beside": frozenset(beside)}
    config = WorkerConfig(**chosen)
    if config.residual is not None:
        ResidualFile.read(config.residual)
    for kind, path in config.artifact_files.items():
        ARTIFACT_FILES[kind].read(path)  # refused before the model has been loaded
    return config


def expert_policy(options: Mapping[str, Any]) -> tuple[str | None, Mapping[str, Any]]:
    """The expert policy's name, None where it has no option, and its own options. Raises InvalidConfig,
    click.BadParameter."""
    from greenroom.worker.model.config import chosen_policy

    try:
        own = json.loads(options["policy_options"])
    except ValueError as error:
        raise click.BadParameter(f"this is no JSON ({error})", param_hint="--policy-options") from error
    if not isinstance(own, dict):
        raise click.BadParameter('write a JSON object such as {"alpha": 0.9}', param_hint="--policy-options")
    return chosen_policy(options["policy"], own) if options.get("policy") is not None else (None, own)
