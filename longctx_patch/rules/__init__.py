"""Rules that every room words alike: names that exist, and degrees that fit the processes."""
