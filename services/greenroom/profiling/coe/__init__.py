"""``greenroom coe profile``: what a collaboration's experts cost here, and how its memory is best divided."""
