"""Forecasts and artifacts from the predictor."""
