"""The loss of a patched model, and the head that computes it."""
