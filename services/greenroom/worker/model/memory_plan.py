"""How the memory is shared out between dense weights, KV, experts and the step's own workspace.

Pure: the machine's figures come in, a plan goes out. The plan says what was decided and why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from greenroom.core.errors import BudgetTooSmall
from greenroom.core.units import MIB, format_bytes, parse_bytes
from greenroom.policies.base.slot_sizes import SlotSizes
from greenroom.worker.usable_memory import Memory

HEADROOM = 0.05
"""Share of the available memory that ``auto`` leaves to the rest of the machine."""

KV_SHARE = 0.25
"""The largest share of what dense weights leave that ``auto`` gives to KV while not all experts fit."""

KV_SPREAD = 2.0
"""Times what as many requests as may run are expected to hold: ``auto`` gives KV no more while not all experts fit."""

HOST_SHARE = 0.75
"""The largest share of the available RAM that ``auto`` gives to a host tier with locked pages. The system can not take
such pages back: the page cache and other processes have to do with the rest.
"""

ATTENTION_SHARE = 0.25
"""The largest share that attention over the longest context gets of attention, KV and experts while not all fit."""

ROWS_SHARE = 1 / 8
"""Of the experts' memory: the most that ``--tokens-per-step auto`` takes for steps of more rows."""

LEAST_CONTEXT = 1024
"""Tokens. A request's length is not cut below this to save memory."""

ALLOCATOR_SLACK = 128 * MIB
"""Freed blocks that the allocators keep, pages of code that a first step touches, and what oneDNN keeps
(``moe/native/onednn.py``).
"""


ACCELERATOR_SLACK = 512 * MIB
"""What a GPU's libraries take for themselves, and freed blocks that its allocator can not use."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What the model needs, in bytes. ``slot_sizes``: how memory for experts is cut. ``kv_for_one``: the KV of one
    sequence at full length; ``kv_for_all``: that of as many sequences as may run; ``kv_expected``: what these are
    expected to hold at their ends, which is ``kv_for_all`` where nothing is known (0). ``attention``: the part of the
    workspace that grows with the length of a sequence. ``chunked``: the batch policy keeps to ``--prefill-chunk``.
    """

    dense: int
    workspace: int
    slot_sizes: SlotSizes
    kv_for_one: int
    kv_for_all: int
    attention: int = 0
    chunked: bool = True
    kv_expected: int = 0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and numbers of slots for experts. ``base``: what the process occupies before anything is loaded.

    ``apart``: the device has memory of its own. The plan is of that memory then; ``base`` and the host tier are RAM.
    """

    base: int
    dense: int
    workspace: int
    kv: int
    slot_sizes: SlotSizes
    device_slots: int
    host_slots: int
    notes: tuple[str, ...] = ()
    apart: bool = False

    @property
    def experts(self) -> int:
        return self.slot_sizes.experts

    @property
    def mean_expert_bytes(self) -> int:
        """Of all experts of the model."""
        return self.slot_sizes.mean_bytes

    @property
    def expert_memory(self) -> int:
        """Bytes of the device's slots together."""
        return self.slot_sizes.nbytes(self.device_slots)

    @property
    def host_bytes(self) -> int:
        return self.slot_sizes.nbytes(self.host_slots)

    @property
    def total(self) -> int:
        """The most that the process will occupy: of the device's memory where that is apart, else of RAM."""
        on_device = self.dense + self.workspace + self.kv + self.expert_memory
        return on_device if self.apart else on_device + self.base + self.host_bytes

    def describe(self) -> str:
        """The plan as a person reads it, one line a share."""
        share = self.device_slots / self.experts
        base = ("runtime", self.base, "what Python and torch occupy before anything is loaded")
        host = ("host tier", self.host_bytes, f"{self.host_slots} experts between disk and device")
        rows = [
            ("dense weights", self.dense, "attention, routers, embeddings: always in memory"),
            ("workspace", self.workspace, "activations of the largest step, what foresees picks, allocator slack"),
            ("KV", self.kv, "running requests"),
            (
                "experts",
                self.expert_memory,
                f"{self.device_slots} of {self.experts} experts ({share:.0%}), {self.slot_sizes.describe()} each",
            ),
        ]
        total = ("total", self.total, "; ".join(self.notes))
        if self.apart:
            rows.append(("total on GPU", total[1], total[2]))
            rows += [base, host] if self.host_slots else [base]
        else:
            rows = [base, *rows, *([host] if self.host_slots else []), total]
        return "\n".join(f"  {name:<14}{format_bytes(size):>10}  {why}".rstrip() for name, size, why in rows)


def plan_memory(
    needs: Needs,
    machine: Memory,
    base: int,
    *,
    expert_memory: str,
    host_memory: str,
    kv_memory: str,
    loaded: int = 0,
    ram: Memory | None = None,
) -> MemoryPlan:
    """Share out ``machine``, the memory that is computed in.

    ``ram``: the memory of the host tier, where that is not ``machine``. A host tier of ``auto`` has room for every
    expert, within HOST_SHARE, so that an evicted expert is still on the host; it has none where the device holds all
    experts. ``loaded``: bytes of ``needs`` that are in memory already. Each memory is ``auto`` or a size; the experts'
    two may also be a share of all experts. Raises BudgetTooSmall where the model can not run in what it gets, and
    InvalidConfig for text that is no size.
    """
    sizes = needs.slot_sizes
    all_experts = sizes.all_bytes
    workspace = needs.workspace if ram is None else needs.workspace + ACCELERATOR_SLACK
    fixed = needs.dense + workspace
    notes = []
    available = machine.available + loaded
    spare = int(available * (1 - HEADROOM)) - fixed
    host = _budget(host_memory, "host_memory", all_experts)
    if ram is None:
        host = host or 0
        spare -= host
    experts = _budget(expert_memory, "expert_memory", all_experts)
    kv = _budget(kv_memory, "kv_memory", None)
    ways = _ways(needs, expert_memory=expert_memory, host_memory="auto" if ram else host_memory, kv_memory=kv_memory)
    if kv is None:
        kv = _auto_kv(needs, spare, all_experts if experts is None else min(experts, all_experts))
    if kv < needs.kv_for_one:
        notes.append(f"KV holds {kv / needs.kv_for_one:.0%} of one request at full length")
    if experts is None:
        experts = min(all_experts, spare - kv)
        limited = "all of them fit" if experts == all_experts else f"{machine.source} has no more"
        notes.append(f"experts sized to the memory available ({format_bytes(available)}; {limited})")
    slots = sizes.within(experts)
    if slots < sizes.least:
        raise BudgetTooSmall(
            f"{format_bytes(max(experts, 0))} for experts hold {slots} of {sizes.describe()}; {sizes.say_least()}: "
            f"give at least {format_bytes(sizes.nbytes(sizes.least))} (--expert-memory)"
            + (f"; to leave them more: {ways}" if expert_memory == "auto" else "")
        )
    if ram is not None:
        host = _host_in_ram(host, ram, 0 if slots == sizes.experts else all_experts)
    plan = MemoryPlan(
        base=base,
        dense=needs.dense,
        workspace=workspace,
        kv=kv,
        slot_sizes=sizes,
        device_slots=slots,
        host_slots=sizes.host_slots(host or 0),
        notes=tuple(notes),
        apart=ram is not None,
    )
    wanted = plan.total if plan.apart else plan.total - base
    if wanted > available:
        raise BudgetTooSmall(
            f"the model, its KV and its experts would take {format_bytes(wanted)}, but "
            f"{machine.source} has {format_bytes(available)} available:\n{plan.describe()}\n"
            f"what helps: {ways}"
        )
    return plan


def plan_to_fit(
    needs_at: Callable[[int], Needs], longest: int, plan: Callable[[Needs], MemoryPlan], *, fixed: bool
) -> tuple[MemoryPlan, int]:
    """The plan, and how many tokens a request may have: ``longest`` where ``fixed``, else possibly fewer.

    Attention over a very long context can take more than there is, or leave little to the experts. So the length is
    halved, down to LEAST_CONTEXT, while not all experts fit and attention takes more than ATTENTION_SHARE of what it
    shares with KV and experts. Raises BudgetTooSmall, with the reason at full length, where no length fits.
    """
    refused: BudgetTooSmall | None = None
    found: tuple[MemoryPlan, int] | None = None
    length = longest
    while True:
        needs = needs_at(length)
        try:
            made = plan(needs)
        except BudgetTooSmall as error:
            refused = refused or error
        else:
            found = made, length
            modest = needs.attention <= ATTENTION_SHARE * (needs.attention + made.kv + made.expert_memory)
            if fixed or modest or made.device_slots == made.experts:
                break
        if fixed or length // 2 < LEAST_CONTEXT:
            break
        length //= 2
    if found is None:
        assert refused is not None
        raise refused
    made, length = found
    if length < longest:
        why = f"attention over {longest} would take {format_bytes(needs_at(longest).attention)}"
        made = replace(made, notes=(*made.notes, f"requests of at most {length} tokens ({why}; --max-model-len)"))
    return made, length


def plan_rows(
    plan_at: Callable[[int], tuple[MemoryPlan, int]],
    fewest: int,
    longest: int,
    *,
    holds: Callable[[MemoryPlan], int],
) -> tuple[MemoryPlan, int, int]:
    """The plan, the length of a request, and the rows of a step: ``fewest``, doubled while that is worth its memory.

    More rows let longer prompts run whole, up to ``longest``, and no longer ones than the plan's KV ``holds`` tokens
    of. They take workspace, which experts and KV could have. So rows are doubled while the workspace beyond that of
    ``fewest`` is at most ROWS_SHARE of what experts have with ``fewest``, and no request has to be shorter for
    attention's sake. ``plan_at`` gives plan and length for so many rows, as ``plan_to_fit``. Raises BudgetTooSmall
    where not even ``fewest`` fit.
    """
    least, length = plan_at(fewest)
    chosen, rows = least, fewest
    while rows < min(longest, holds(chosen)):
        try:
            made, made_length = plan_at(2 * rows)
        except BudgetTooSmall:
            break
        taken = made.workspace - least.workspace
        if taken > ROWS_SHARE * least.expert_memory or made_length < length or holds(made) <= rows:
            break
        chosen, rows = made, 2 * rows
    note = f"{rows} rows a step (--tokens-per-step auto)"
    if rows > fewest:
        lost = [f"{least.device_slots - chosen.device_slots} experts"]
        if chosen.kv < least.kv:
            lost.append(f"{format_bytes(least.kv - chosen.kv)} of KV")
        taken = chosen.workspace - least.workspace
        note += f", for which there are {format_bytes(taken)} less than with {fewest}: {' and '.join(lost)}"
    return replace(chosen, notes=(*chosen.notes, note)), length, rows


def _ways(needs: Needs, *, expert_memory: str, host_memory: str, kv_memory: str) -> str:
    """The options that make room, as a person reads them."""
    asked = {"--expert-memory": expert_memory, "--host-memory": host_memory, "--kv-memory": kv_memory}
    ways = [f"less for {option}" for option, size in asked.items() if size != "auto"]
    if needs.attention:
        ways.append(f"a shorter --max-model-len (attention over it takes {format_bytes(needs.attention)})")
    rest = format_bytes(max(0, needs.workspace - needs.attention))
    chunk = ", with a smaller --prefill-chunk" if needs.chunked else ""
    ways.append(f"fewer --tokens-per-step{chunk} (the rest of a step takes {rest})")
    return ", ".join(ways)


def _host_in_ram(asked: int | None, ram: Memory, useful: int) -> int:
    """Bytes of RAM for the host tier. ``useful``: the most that helps. Its pages are locked, so it must fit."""
    most = int(ram.available * (1 - HEADROOM))
    if asked is None:
        return max(0, min(useful, int(ram.available * HOST_SHARE)))
    if asked > most:
        raise BudgetTooSmall(
            f"the host tier would take {format_bytes(asked)} of RAM, but {ram.source} has "
            f"{format_bytes(ram.available)} available: give less to --host-memory"
        )
    return asked


def _auto_kv(needs: Needs, spare: int, experts: int) -> int:
    """KV for all running requests at full length where that is cheap. Else a share, at most what they will probably use
    and at least one request if it fits.
    """
    beside_experts = spare - experts
    if needs.kv_for_all <= beside_experts:
        return needs.kv_for_all
    share = max(beside_experts, int(spare * KV_SHARE))
    useful = needs.kv_for_all
    if needs.kv_expected:
        useful = min(useful, max(needs.kv_for_one, int(KV_SPREAD * needs.kv_expected)))
    return max(min(useful, share), min(needs.kv_for_one, spare - needs.slot_sizes.nbytes(needs.slot_sizes.least)), 0)


def _budget(text: str, field: str, whole: int | None) -> int | None:
    """Bytes; None for ``auto``."""
    return None if text == "auto" else parse_bytes(text, field=field, whole=whole)
