"""Hypothesis tries the same examples in each run, so a change alone decides whether tests pass.

To search further: `pytest --hypothesis-profile=default tests/test_masks.py`.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
