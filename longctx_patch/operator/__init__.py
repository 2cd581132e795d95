"""Attention calls for users and models: what runs is decided here and handed to the engine."""
