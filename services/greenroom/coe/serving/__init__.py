"""A collaboration that runs: one thread decides and owns the memories, executors compute."""
