"""The command line ``greenroom-load``."""

from greenroom_load.cli.main import main

__all__ = ["main"]
