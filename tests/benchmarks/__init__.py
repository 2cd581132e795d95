"""The benchmark scripts, tiny and on CPU: they run, and their figures are what they say."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Python puts a script's folder on the path, where the scripts find measure.py.
sys.path.append(str(ROOT / "benchmarks"))
