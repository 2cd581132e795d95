"""What a run writes to go on from: checkpoints that are checked, chosen, kept and locked."""
