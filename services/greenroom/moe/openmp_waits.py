"""How long OpenMP's threads wait for more work before they sleep. For greenroom's own processes.

After each product the threads of GNU's OpenMP, which torch computes with on Linux, turn in a loop for some
milliseconds, in case the next one follows. While a layer waits for an expert that is the whole wait, on a core that the
read from the disk needs. Products of one step follow each other within tenths of a millisecond.
"""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "GOMP_SPINCOUNT"
SPINS: Final = 10_000
"""Some tenths of a millisecond."""

_POLICY: Final = "OMP_WAIT_POLICY"


def wait_briefly() -> None:
    """Have OpenMP's threads sleep soon, in this process and its children. Variables that are already set stay.

    OpenMP reads them once, when it is loaded, so this is to be called before torch is imported; later it does nothing.
    """
    if _POLICY not in os.environ:
        os.environ.setdefault(VARIABLE, str(SPINS))
