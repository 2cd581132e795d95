"""One process of `longctx train`: `forked.py RECIPE OPTIONS...` runs the recipe with the options.

Signals end it at once. A forked process has its launcher's handlers, which raise an exception.
"""

import runpy
import signal
import sys

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    sys.argv = sys.argv[1:]
    runpy.run_module(f"longctx_patch.recipes.{sys.argv[0]}", run_name="__main__", alter_sys=True)
