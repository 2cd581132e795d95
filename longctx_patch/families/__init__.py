"""What a model family is: the table of support, a config's facts and checks, RoPE, weights."""
