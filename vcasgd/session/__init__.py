"""``vcasgd.Session``: run an existing training loop as a task."""
