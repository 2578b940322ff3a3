"""The parts of the stage, each a comparison."""
