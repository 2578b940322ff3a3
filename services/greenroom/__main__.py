"""``python -m greenroom`` is ``greenroom``."""

from greenroom.cli import main

main(prog_name="greenroom")
