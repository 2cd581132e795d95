"""The stock model: what is assumed of transformers, and the kernels that it runs."""
