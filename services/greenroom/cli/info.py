"""``greenroom info``: what a checkpoint is, what it needs and what fits here. Reads and downloads no weights."""

from __future__ import annotations

import json

import click

from greenroom.cli.model_options import computing_options, dense_as_option, experts_as_option
from greenroom.core.units import format_bytes


@click.command()
@click.argument("model", required=False)
@click.option("--revision", help="Branch, tag or commit of a model on the hub.")
@click.option("--offline", is_flag=True, help="Use only what was downloaded before; no network.")
@click.option("--dtype", default="auto", show_default=True, help="As for serve.")
@experts_as_option
@dense_as_option
@computing_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def info(
    model: str | None,
    revision: str | None,
    offline: bool,
    dtype: str,
    experts_as: str,
    dense_as: str,
    device: str,
    products: str,
    as_json: bool,
) -> None:
    """Show layers, experts and sizes of MODEL (a folder, a GGUF file or a hub id), and what fits into this machine.

    Its config.json is enough. Weights that are here are checked against it; none are downloaded. In --json sizes are
    bytes: expert_bytes that of one expert, the mean where they differ, and expert_sizes all that there are.

    \b
    Examples:
      greenroom info                     the bundled model
      greenroom info ./checkpoint --json
      greenroom info ./model-Q4_K_M.gguf
    """
    from greenroom.demo import bundled_model_path
    from greenroom.experts.copying.cuda import device_type
    from greenroom.moe.loading.checkpoint import resolve_config
    from greenroom.moe.loading.kept_format import describe_kept
    from greenroom.worker.model.checkpoint_summary import summarise
    from greenroom.worker.usable_memory import memory

    found = resolve_config(model or str(bundled_model_path()), revision=revision, offline=offline)
    summary = summarise(found, dtype, experts_as, dense_as, products=products, device=device_type(device))
    if as_json:
        click.echo(json.dumps(summary.record(), indent=2))
        return
    machine, sizes = memory(), summary.slot_sizes
    kv = "unknown" if summary.kv_bytes_per_token is None else f"{format_bytes(summary.kv_bytes_per_token)} a token"
    kept = describe_kept([summary.expert_format], experts_as)
    kept += " (--experts-as)" if kept else ""
    if summary.stays_in_bfloat16:
        kept = f", made of {summary.stays_in_bfloat16}, which they stay with --dtype bfloat16"
    dense = f", as {' and '.join(summary.dense_formats)} (--dense-as)" if summary.dense_formats else ""
    if summary.dense_may_be_less:
        dense = " at most: only the weights' headers say which of them are codes (--dense-as)"
    told = "config.json" if found.gguf is None else "the file's metadata"
    rows = [
        ("model", f"{summary.name} ({summary.model_type}, {summary.dtype})"),
        ("weights", f"as {told} says" if summary.checked else "none here: all sizes are by config.json alone"),
        ("MoE layers", f"{summary.moe_layers} with {summary.experts_per_layer} experts, top-{summary.top_k}"),
        ("experts", f"{summary.experts} of {sizes.describe()}: {format_bytes(sizes.all_bytes)}{kept}"),
        ("dense weights", f"{format_bytes(summary.dense_bytes)}{dense}"),
        ("KV", kv),
        ("context", f"{summary.max_model_len} tokens"),
        ("batch loop", summary.refused or "served"),
        ("least memory", f"{format_bytes(summary.least_bytes)} for dense weights and {sizes.least} experts"),
        ("this machine", f"{format_bytes(machine.available)} available ({machine.source})"),
        ("what fits", summary.fits(machine.available)),
    ]
    for name, value in rows:
        click.echo(f"{name:<14}{value}")
