"""Recurrent layers over shards: states and tails handed from rank to rank."""
