"""What the pipeline costs: beside the engine called in its own process, at saturation, and beyond it."""
