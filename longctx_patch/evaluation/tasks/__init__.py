"""Rows to evaluate on: retrieval tasks of any length, and questions of the user's own."""
