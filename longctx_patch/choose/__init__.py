"""One chooser of plans, degrees and waves, and the search for a way to train a model."""
