"""Shows whether a model uses a long context: losses by position, and tasks by length and depth."""
