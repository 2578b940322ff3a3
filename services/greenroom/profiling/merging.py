"""What a profile keeps of an earlier one of the same model."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from greenroom.core.model_profile import ModelProfile, TaskProfile

EARLIER = "earlier command"
"""Among the notes: what made the rest."""


def merged(new: ModelProfile, earlier: ModelProfile, stages: Collection[str]) -> ModelProfile:
    """``new``, where the chosen ``stages`` have not measured something with what ``earlier`` has of it.

    A new profile always has lengths and popularity, but only counts for them where ``lengths`` was chosen, or for tasks
    that the earlier one did not have; with them it says which tasks there are.
    """
    tasks: dict[str, TaskProfile] = dict(new.tasks if "lengths" in stages else earlier.tasks)
    for name, task in new.tasks.items():
        before = earlier.tasks.get(name, task)
        kept = task if "lengths" in stages else before
        tasks[name] = msgspec.structs.replace(
            kept,
            sensitivity=task.sensitivity or before.sensitivity,
            pick_worth=task.pick_worth or before.pick_worth,
        )
    notes = {**earlier.notes, **new.notes}
    if "command" in earlier.notes:
        notes[EARLIER] = earlier.notes["command"]
    return msgspec.structs.replace(
        new, tasks=tasks, costs=new.costs or earlier.costs, reuse=new.reuse or earlier.reuse, notes=notes
    )
