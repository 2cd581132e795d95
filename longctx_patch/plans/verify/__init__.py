"""Prove a plan correct before it runs: form, coverage, progress, and a walk through its steps."""
