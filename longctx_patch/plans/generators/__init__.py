"""One schedule of distributed attention per file, and the table that names them."""
