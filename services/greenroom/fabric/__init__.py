"""What services are held together by: the log, calls between processes, their lives, and what they tell of it."""
