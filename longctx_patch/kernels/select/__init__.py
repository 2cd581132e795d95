"""Chooses the kernel that computes: of what there is, what fits, and is fastest on this machine."""
