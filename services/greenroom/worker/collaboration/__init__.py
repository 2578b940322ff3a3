"""A collaboration of experts as what a worker's service judges inferences with."""
