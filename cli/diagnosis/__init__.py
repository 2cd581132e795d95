"""Whether a machine, or the processes of a launcher, can train, and what mends what is missing."""
