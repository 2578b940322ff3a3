"""What foretells routing paths from tokens, made of recorded routing (ExpertFlow, section 3.1)."""
