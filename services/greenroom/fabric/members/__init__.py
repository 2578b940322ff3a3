"""Who is here: every instance announces itself on ``members`` and reads there which others do."""

from greenroom.fabric.members.announcer import Announcer
from greenroom.fabric.members.directory import Directory

__all__ = ["Announcer", "Directory"]
