"""One process of `longctx train`: `forked.py LAUNCHER RECIPE OPTIONS...` runs the recipe with the
options, and ends when the process LAUNCHER does.

Signals end it at once, until the recipe decides otherwise. A forked process has its launcher's
handlers, which raise an exception.
"""

import signal
import sys
from importlib import import_module

from longctx_patch.health.family import end_with
from longctx_patch.health.last_words import say

if __name__ == "__main__":
    _, launcher, name, *options = sys.argv
    end_with(int(launcher), lambda words: say(f"{name}: {words}"))  # imports take seconds
    from longctx_patch.recipes.launch import one_message
    from longctx_patch.recipes.saving.signals import STOP_SIGNALS

    for number in (*STOP_SIGNALS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    with one_message(name):
        import_module(f"longctx_patch.recipes.{name}").main(options)
