"""Policies × budgets × concurrency on one trace: cells, tables, pictures."""
