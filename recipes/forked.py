"""One process of `longctx train`: `forked.py RECIPE OPTIONS...` runs the recipe with the options.

Signals end it at once, until the recipe decides otherwise. A forked process has its launcher's
handlers, which raise an exception.
"""

import signal
import sys
from importlib import import_module

from longctx_patch.recipes.launch import one_message
from longctx_patch.recipes.saving.signals import STOP_SIGNALS

if __name__ == "__main__":
    for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    _, name, *options = sys.argv
    with one_message(name):
        import_module(f"longctx_patch.recipes.{name}").main(options)
