"""What a model family is: the table of support, checks of a config, RoPE scaling."""
