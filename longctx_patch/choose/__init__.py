"""One chooser of plans and degrees, and the search for a way to train a model."""
