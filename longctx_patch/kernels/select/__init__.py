"""Which kernel computes: what there is, what fits, and what is fastest on this machine."""
