"""One kernel per file: thin adapters to attention kernels that other projects maintain."""
