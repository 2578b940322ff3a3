"""How many examples a property is tried on: all of them, or a share under the profile of ``make test``."""

from __future__ import annotations

from hypothesis import settings

QUICK = "quick"
"""The profile of ``make test``: ``--hypothesis-profile quick``."""
_ALL, _SHARE = 100, 25
_FEWEST = 3


def register() -> None:
    """The profiles. Without the option all examples are tried."""
    # Time on the wall says nothing of an example on a busy machine; what hangs meets the timeout of its test.
    settings.register_profile("greenroom", deadline=None, max_examples=_ALL)
    settings.register_profile(QUICK, deadline=None, max_examples=_SHARE)
    settings.load_profile("greenroom")


def examples(count: int) -> int:
    """``max_examples`` of a property that has a number of its own: ``count``, or the profile's share of it."""
    profile = settings.get_profile(settings.get_current_profile_name())
    return max(min(count, _FEWEST), count * profile.max_examples // _ALL)
