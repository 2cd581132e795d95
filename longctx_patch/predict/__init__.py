"""What attention and a training run take on a machine, predicted without one."""
