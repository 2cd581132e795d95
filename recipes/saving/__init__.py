"""What a run writes to go on from, what it compares with then, and its lock."""
