"""Families of MoE models, and where their MoE layers are."""
