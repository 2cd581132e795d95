"""One rank's way through a plan: the attention operator and all that runs inside it."""
