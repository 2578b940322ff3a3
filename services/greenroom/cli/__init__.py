"""The command line. Every command imports what it needs when it runs, so that ``--help`` is instant."""

from __future__ import annotations

from greenroom.cli.main import main

__all__ = ["main"]
