"""One forward pass of a patched decoder."""
