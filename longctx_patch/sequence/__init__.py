"""Says which token is where, and who sees whom: documents, layouts, masks and their placement."""
