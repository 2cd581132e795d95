"""The benchmark scripts run on CPU with tiny sizes, and their figures are what they claim to be."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Python puts a script's folder on the path, where the scripts find measure.py.
sys.path.append(str(ROOT / "benchmarks"))
