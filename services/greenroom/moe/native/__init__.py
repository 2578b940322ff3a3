"""Products of a few bf16 rows, compiled from ``rows.cpp`` when the package is installed; optional."""
