"""What a training step takes: memory of GPU and host, and seconds, by component."""
