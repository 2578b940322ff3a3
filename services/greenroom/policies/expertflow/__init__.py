"""ExpertFlow: routing paths foretold from tokens (policy.py), and rows grouped by them."""
