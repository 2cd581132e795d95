"""Which of several ways to share a step is taken, and why the others are not."""

from collections.abc import Sequence

from longctx_patch.choose.search import Result
from longctx_patch.choose.tie import TIE
from longctx_patch.memory.policies import count_recomputed

IN_LAYERS = ("attention", "recurrence", "linear", "elementwise")
"""Parts of a step's time that a layer takes again when it is recomputed."""


def fastest(results: Sequence[Result]) -> Result:
    """The fastest way that fits; where none does, the one that is nearest to fitting.

    Of ways that are as fast within `TIE`, the one wins that takes the least host memory, as in
    `search`, then the one in which fewest GPUs share a row: messages that are hidden today are the
    first to show on a slower link.
    """
    fitting = [result for result in results if result.fits]
    if not fitting:
        return min(results, key=lambda result: result.shortfall)
    most = max(result.tokens_per_second_per_gpu for result in fitting)
    tied = [r for r in fitting if most <= r.tokens_per_second_per_gpu * (1 + TIE)]
    return min(tied, key=lambda result: (result.host_bytes, result.candidate.sequence_degree))


def reason(result: Result, chosen: Result) -> str:
    """Why a way was chosen, or was not."""
    if result is chosen:
        return "chosen"
    if result.reason is not None:
        return result.reason
    slower = chosen.tokens_per_second_per_gpu / result.tokens_per_second_per_gpu - 1
    if slower <= TIE and (extra := _what_is_more(result, chosen)):
        return f"as fast to {TIE:.1%}, with {extra}"
    return f"{slower:.1%} slower: {_what_takes_longer(result, chosen)}"


def _what_is_more(result: Result, chosen: Result) -> str:
    """Why the other of two equally fast ways was chosen; empty if a third way decided, which is as
    fast as the chosen one and faster than `result`."""
    if result.host_bytes > chosen.host_bytes:
        return "more of the host"
    shares_more = result.candidate.sequence_degree > chosen.candidate.sequence_degree
    return "messages of more GPUs per row" if shares_more else ""


def _what_takes_longer(result: Result, chosen: Result) -> str:
    """The parts of a step that make most of the difference, for as many rows."""
    rows = chosen.num_rows / result.num_rows
    before = chosen.time.parts()
    extra = {name: s * rows - before[name] for name, s in result.time.parts().items()}
    largest = max(extra, key=lambda name: extra[name])
    longer = f"{largest} takes {extra[largest]:.2g} s longer"
    more = _num_recomputed(result) - _num_recomputed(chosen)
    if more > 0 and largest in IN_LAYERS:
        layers = "1 layer more is" if more == 1 else f"{more} layers more are"
        return f"{layers} recomputed, so that {longer}"
    return longer


def _num_recomputed(result: Result) -> int:
    return count_recomputed(result.candidate.policies)
