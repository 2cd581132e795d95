"""What one attention call takes: bytes and seconds of each rank, simulated."""
