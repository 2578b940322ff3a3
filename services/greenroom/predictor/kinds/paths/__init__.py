"""The kind `paths`: tables by which routing paths are foretold from tokens."""
