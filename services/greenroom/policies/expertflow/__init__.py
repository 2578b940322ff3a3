"""ExpertFlow: routing paths foretold from tokens, and what is done with them."""
