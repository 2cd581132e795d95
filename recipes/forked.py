"""One process of `longctx train`: `forked.py LAUNCHER RECIPE OPTIONS...` runs the recipe with the
options, and ends when the process LAUNCHER does.

Signals end it at once, until the recipe decides otherwise. A forked process has its launcher's
handlers, which raise an exception.
"""

import signal
import sys
from importlib import import_module

from longctx_patch.health.last_words import end_with, say

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)

if __name__ == "__main__":
    _, launcher, name, *options = sys.argv
    # Before imports, which take seconds.
    end_with(int(launcher), lambda words: say(f"{name}: {words}"))
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as by nohup
            signal.signal(number, signal.SIG_DFL)
    from longctx_patch.plugin.start import wait_for_siblings
    from longctx_patch.recipes.launch import one_message

    wait_for_siblings()
    with one_message(name):
        import_module(f"longctx_patch.recipes.{name}").main(options)
