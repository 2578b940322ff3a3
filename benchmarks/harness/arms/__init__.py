"""Systems under measurement that run in child processes (`child.py`)."""
