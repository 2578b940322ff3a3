"""Task types of prompts whose origin was not seen: how many are told right, and how long that takes."""
