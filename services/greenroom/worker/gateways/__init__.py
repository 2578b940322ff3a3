"""Tokens to the gateways whose clients wait for them."""
