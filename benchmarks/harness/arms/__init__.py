"""Systems under measurement: in child processes (`child.py`), or expert engines in this one (`engine_arm.py`)."""
