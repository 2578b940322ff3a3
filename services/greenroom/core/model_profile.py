"""The profile of a model, by task type, as ``greenroom profile`` measures it: one JSON file that services load.

docs/architecture/profiles.md describes the file. eMoE, section 2.2 and 3.4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from greenroom.core.errors import InvalidConfig
from greenroom.core.step_costs import StepCosts
from greenroom.core.straight_lines import between
from greenroom.core.units import MIB

FORMAT = "greenroom-model-profile"
PROFILE_FILE = "profile.json"
"""Its name in a model's folder."""
MAX_FILE_BYTES = 64 * MIB

Share = Annotated[float, Meta(ge=0, le=1)]
Above = Annotated[float, Meta(gt=0)]
NotBelow = Annotated[float, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a task's prompts, or of its answers. ``cdf``: (tokens, share of prompts with at most so many), rising
    (eMoE, Fig. 4)."""

    mean: NotBelow
    p50: NotBelow
    p90: NotBelow
    p99: NotBelow
    most: NotBelow
    cdf: tuple[tuple[NotBelow, Share], ...] = ()


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """How random routing of the first MoE layers changes the answers (eMoE, section 2.2.3, Fig. 5).

    ``similarity[n]``: mean similarity to the undisturbed answers with the first n MoE layers routed at random, n from 0
    to all layers; ``least`` and ``most``: over seeds. ``exact[n]``: share of right answers, where the task has a right
    answer. ``insensitive_layers``: the largest n such that the similarity is at least ``threshold`` for 0 to n.
    """

    threshold: Share
    insensitive_layers: Annotated[int, Meta(ge=0)]
    similarity: tuple[float, ...] = ()
    least: tuple[float, ...] = ()
    most: tuple[float, ...] = ()
    exact: tuple[Share, ...] | None = None


class PickWorth(msgspec.Struct, frozen=True, kw_only=True):
    """What it is worth that rows get the experts that their router picks. ``loss[l][e]``: by how many nats the mean
    token of the task's answers is less probable without layer l's expert e.
    """

    loss: tuple[tuple[NotBelow, ...], ...]


class TaskProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One task type. ``popularity[l][e]``: the share of layer l's picks that went to expert e; 1 in sum over the layer,
    and 0 behind the layer's last expert."""

    prompts: Count
    input_tokens: Lengths
    generated_tokens: Lengths
    popularity: tuple[tuple[NotBelow, ...], ...]
    sensitivity: Sensitivity | None = None
    pick_worth: PickWorth | None = None


class MeasuredCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds on one machine. ``token_ms_by_rows[b]``: eMoE's c: the time of a decode step of b rows, over b;
    n requests of G tokens each cost n · G · c. ``prefill_token_ms``: the time of a prompt's token, prompt by prompt.
    ``prompt_step_ms[p]``: the time of a step that reads p rows of prompts; empty in older profiles.
    ``beside_prompts``: the share of a decode step's time by which its rows make a step with prompts longer.
    ``load_ms_by_experts[n]``: eMoE's ΔE: the time to bring n experts to the device together. ``machine``: its processor
    and how many of its cores were there (``machine_name``); empty in older profiles. ``expert_format``: of the records
    that were moved and computed with; older profiles knew numbers alone.
    """

    token_ms_by_rows: Annotated[dict[Count, Above], Meta(min_length=1)]
    prefill_token_ms: Above
    prompt_step_ms: dict[Count, Above] = {}
    beside_prompts: Share | None = None
    load_ms_by_experts: dict[Count, NotBelow] = {}
    machine: str = ""
    expert_format: str = "plain"

    def steps(self) -> StepCosts:
        """The time of any step. An older profile knows decode steps alone: a prompt's row counts as one that decodes,
        and each beyond the largest batch costs what a prompt's token does."""
        decode = {rows: rows * ms for rows, ms in self.token_ms_by_rows.items()}
        if self.prompt_step_ms:
            return StepCosts(decode, self.prompt_step_ms, self.beside_prompts)
        most = max(decode)
        reading = {**decode, most + 1: decode[most] + self.prefill_token_ms}
        return StepCosts(decode, reading, onward=self.prefill_token_ms)

    def token_ms(self, rows: int) -> float:
        """c at a batch of ``rows``: on the straight line of whole steps between measured sizes, that of the largest
        beyond it."""
        return self.steps().token_ms(rows)

    def said_of_machine(self, here: str) -> str | None:
        """What to tell a user whose machine, ``here``, is not the one that was measured; None: it is, or it is not
        known which was."""
        if self.machine in ("", here):
            return None
        return (
            f"the costs in the profile were measured on {self.machine}, and this is {here}: what steps and loads take "
            "may be wrong here, so measure them with `greenroom profile --stages costs`"
        )

    def said_of_format(self, here: str) -> str | None:
        """What to tell a user whose experts are kept in another format (``here``) than when it was measured."""
        if self.expert_format == here:
            return None
        return (
            f"the costs in the profile were measured with experts as {self.expert_format}, and here they are kept as "
            f"{here} (--experts-as): what steps and loads take may be wrong here, so measure them with `greenroom "
            "profile --stages costs`"
        )

    def load_ms(self, experts: float) -> float:
        """ΔE of so many experts: a straight line between (0, 0) and the measured numbers, in proportion beyond."""
        if experts <= 0 or not self.load_ms_by_experts:
            return 0.0
        most = max(self.load_ms_by_experts)
        if experts > most:
            return self.load_ms_by_experts[most] * experts / most
        return between({0: 0.0, **self.load_ms_by_experts}, experts)


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """What it costs to go on with the same experts for p prompts (eMoE, section 3.3, Fig. 10).

    ``perplexity[p]``; p = 0: the experts are chosen anew for every prompt. ``proposed_every``: the largest p within the
    tolerance, for ``--forecast-every``. ``share``: the share of all experts that was kept. ``with_all``: the perplexity
    with all experts.
    """

    share: Share
    perplexity: dict[Annotated[int, Meta(ge=0)], Above]
    proposed_every: Count
    with_all: Above | None = None


class ModelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """``layers`` MoE layers of at most ``experts`` experts, of which a row picks ``top_k``.

    For a task type that was not profiled the figures of all profiled ones are used.
    """

    format: Literal["greenroom-model-profile"]
    version: Literal[1]
    model: str
    layers: Count
    experts: Count
    top_k: Count
    tasks: Annotated[dict[str, TaskProfile], Meta(min_length=1)]
    costs: MeasuredCosts | None = None
    reuse: Reuse | None = None
    notes: Mapping[str, str] = {}
    """How it was made: dtype, seeds, when, on what; for people."""

    def said_of_machine(self, here: str) -> str | None:
        """As its costs say (``MeasuredCosts.said_of_machine``); None also where it has none."""
        return None if self.costs is None else self.costs.said_of_machine(here)

    def said_of_format(self, here: str) -> str | None:
        """As its costs say (``MeasuredCosts.said_of_format``); None also where it has none."""
        return None if self.costs is None else self.costs.said_of_format(here)

    def expected_tokens(self, task: str) -> float:
        """The mean number of tokens of an answer of the task (eMoE's G at its start, Wo of Eq. 2)."""
        known = self.tasks.get(task)
        if known is not None:
            return known.generated_tokens.mean
        return _mean((one.generated_tokens.mean, one.prompts) for one in self.tasks.values())

    def insensitive_layers(self, task: str) -> int:
        """In how many of the first MoE layers the task is insensitive; 0 for a task that was not profiled."""
        known = self.tasks.get(task)
        return 0 if known is None or known.sensitivity is None else known.sensitivity.insensitive_layers

    def sensitive(self, task: str, layer: int) -> bool:
        """Eq. 2's s."""
        return layer >= self.insensitive_layers(task)

    def popularity(self, task: str) -> tuple[tuple[float, ...], ...]:
        """[layers][experts]: of the task; for a task that was not profiled the mean over all tasks."""
        known = self.tasks.get(task)
        if known is not None:
            return known.popularity
        count = len(self.tasks)
        return tuple(
            tuple(sum(cells) / count for cells in zip(*rows, strict=True))
            for rows in zip(*(one.popularity for one in self.tasks.values()), strict=True)
        )


def load_model_profile(path: Path) -> ModelProfile:
    """Raises InvalidConfig, naming the file and the place in it."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidConfig("profile", str(path), f"it has {size} bytes, and may have {MAX_FILE_BYTES}")
        data = path.read_bytes()
    except OSError as error:
        said = error.strerror or str(error)
        raise InvalidConfig("profile", str(path), f"a file made by `greenroom profile` ({said})") from error
    return parse_model_profile(data, str(path))


def parse_model_profile(data: bytes, name: str) -> ModelProfile:
    """``name``: the file's name in messages. Raises InvalidConfig."""
    try:
        profile = msgspec.json.decode(data, type=ModelProfile)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidConfig("profile", name, f"a file made by `greenroom profile`: {error}") from error
    for task, one in profile.tasks.items():
        place = f"{name}, at $.tasks[{task!r}]"
        if len(one.popularity) != profile.layers or any(len(row) != profile.experts for row in one.popularity):
            raise InvalidConfig("profile", place, f"popularity has {profile.layers} rows of {profile.experts} shares")
        if any(not math.isclose(sum(row), 1.0, abs_tol=1e-3) for row in one.popularity):
            raise InvalidConfig("profile", place, "the shares of every layer in popularity are 1 in sum")
        worth = one.pick_worth
        if worth is not None and (
            len(worth.loss) != profile.layers or any(len(row) != profile.experts for row in worth.loss)
        ):
            raise InvalidConfig("profile", place, f"pick_worth has {profile.layers} rows of {profile.experts} losses")
        if one.sensitivity is not None and one.sensitivity.insensitive_layers > profile.layers:
            raise InvalidConfig("profile", place, f"at most all {profile.layers} layers are insensitive")
    return profile


def dump_model_profile(profile: ModelProfile) -> bytes:
    """As JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(profile), indent=1)


def _mean(weighted: Iterable[tuple[float, float]]) -> float:
    pairs = list(weighted)
    return sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
