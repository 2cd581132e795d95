"""One schedule of distributed attention a file, and the table that names them."""
