"""Training data: sources read record by record, rows of tokens made of them, tables on disk."""
