from __future__ import annotations

from tests.quiet_transformers import no_progress_bars as no_progress_bars
