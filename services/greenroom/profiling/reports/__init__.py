"""A profile and observations for people: text and pictures."""
