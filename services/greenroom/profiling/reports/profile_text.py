"""A profile as a terminal shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from greenroom.core.model_profile import ModelProfile


def describe_profile(profile: ModelProfile) -> str:
    """Tables of what was measured, and what was not and why."""
    parts = [
        f"{profile.model}: {profile.layers} MoE layers of at most {profile.experts} experts, top-{profile.top_k}",
        _tasks(profile),
    ]
    if any(task.sensitivity is not None for task in profile.tasks.values()):
        parts.append(_sensitivity(profile))
    if any(task.pick_worth is not None for task in profile.tasks.values()):
        parts.append(_losses(profile))
    if profile.reuse is not None:
        reuse = profile.reuse
        figures = ", ".join(f"{figure:.4f} at p = {p}" for p, figure in sorted(reuse.perplexity.items()))
        rest = "" if reuse.with_all is None else f" ({reuse.with_all:.4f} with all experts)"
        parts.append(
            f"perplexity with {reuse.share:.0%} of the experts kept for p prompts: {figures}{rest}\n"
            f"proposed: --forecast-every {reuse.proposed_every}"
        )
    if profile.costs is not None:
        costs = profile.costs
        rows = [("rows in a step", "ms a token")]
        rows += [(str(size), f"{cost:.3f}") for size, cost in sorted(costs.token_ms_by_rows.items())]
        rows.append(("of a prompt", f"{costs.prefill_token_ms:.3f}"))
        loads = [("experts loaded", "ms")]
        loads += [(str(count), f"{cost:.2f}") for count, cost in sorted(costs.load_ms_by_experts.items())]
        parts.append((f"on {costs.machine}\n" if costs.machine else "") + _table(rows))
        if costs.prompt_step_ms:
            steps = [("rows of prompts in a step", "ms a step")]
            steps += [(str(size), f"{took:.2f}") for size, took in sorted(costs.prompt_step_ms.items())]
            parts.append(_table(steps))
        if len(loads) > 1:
            parts.append(_table(loads))
    return "\n\n".join(parts)


def _tasks(profile: ModelProfile) -> str:
    rows: list[Sequence[str]] = [
        ("task", "prompts", "prompt tokens, mean", "answer tokens, mean", "p50", "p90", "p99", "most")
    ]
    for name, task in profile.tasks.items():
        made = task.generated_tokens
        lengths = (f"{value:.0f}" for value in (made.p50, made.p90, made.p99, made.most))
        rows.append((name, str(task.prompts), f"{task.input_tokens.mean:.1f}", f"{made.mean:.1f}", *lengths))
    return _table(rows)


def _sensitivity(profile: ModelProfile) -> str:
    layers = profile.layers
    head = ("similarity with so many layers at random", *map(str, range(layers + 1)), "insensitive layers")
    rows: list[Sequence[str]] = [head]
    for name, task in profile.tasks.items():
        if task.sensitivity is not None:
            figures = (f"{value:.2f}" for value in task.sensitivity.similarity)
            rows.append((name, *figures, str(task.sensitivity.insensitive_layers)))
    for name, task in profile.tasks.items():
        if task.sensitivity is not None and task.sensitivity.exact is not None:
            rows.append((f"{name}, right answers", *(f"{value:.2f}" for value in task.sensitivity.exact), ""))
    return _table(rows)


def _losses(profile: ModelProfile) -> str:
    rows: list[Sequence[str]] = [
        ("nats that a token loses without an expert, added up", *(f"layer {n}" for n in range(profile.layers)))
    ]
    for name, task in profile.tasks.items():
        if task.pick_worth is not None:
            rows.append((name, *(f"{sum(row):.3f}" for row in task.pick_worth.loss)))
    return _table(rows)


def _table(rows: Iterable[Sequence[str]]) -> str:
    lines = [tuple(row) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]).rstrip()
        for line in lines
    )
