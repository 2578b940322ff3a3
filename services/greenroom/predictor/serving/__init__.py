"""Forecasts, from the versions that are served."""
