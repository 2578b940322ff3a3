"""How good a prediction is, and whether what was learnt may be served."""
