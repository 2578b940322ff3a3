"""The packed expert file, and reading it past the page cache."""
