"""Rules whose errors all parts word alike: names that exist, degrees that fit the processes.

And what the launcher told this process, and what all ranks tell each other.
"""
