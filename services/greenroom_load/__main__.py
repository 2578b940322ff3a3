"""``python -m greenroom_load`` is ``greenroom-load``."""

from greenroom_load.cli import main

main(prog_name="greenroom-load")
