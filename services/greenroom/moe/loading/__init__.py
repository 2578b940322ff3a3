"""Loads a checkpoint as a model whose experts come from an ExpertSource."""
