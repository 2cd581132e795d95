"""One kernel a file: thin adapters to attention kernels that others keep."""
