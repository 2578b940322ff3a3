"""``pull``, our own, for graphs of whole models."""
