"""The arms of the stage: policies on the real engine, and accelerate."""
