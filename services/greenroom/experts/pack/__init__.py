"""The packed expert file, and direct reads from it."""
