"""Describes model families: the table of support, a config's facts and checks, RoPE, weights."""
