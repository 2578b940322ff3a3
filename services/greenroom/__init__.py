"""greenroom: serves Mixture-of-Experts models whose experts do not fit in the accelerator's memory."""

__version__ = "0.1.0"
