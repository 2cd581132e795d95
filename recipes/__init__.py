"""Training scripts started by `accelerate launch`, made to be read, copied and changed."""
