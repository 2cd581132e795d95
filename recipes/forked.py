"""One process of `longctx train`: `forked.py RECIPE OPTIONS...` runs the recipe with the options.

Signals end it at once. A forked process has its launcher's handlers, which raise an exception.
"""

import signal
import sys
from importlib import import_module

from longctx_patch.recipes.launch import one_message

if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _, name, *options = sys.argv
    with one_message(name):
        import_module(f"longctx_patch.recipes.{name}").main(options)
