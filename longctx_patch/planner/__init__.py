"""What attention and a training step take on a machine, predicted, and what is chosen by it."""
