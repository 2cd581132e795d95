"""Predicts what attention and a training step take on a machine, and chooses by it."""
