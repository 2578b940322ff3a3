"""Artifacts that expert policies predict by, made anew from live traces: moe-infinity's EAMC, reuse's coefficients."""
