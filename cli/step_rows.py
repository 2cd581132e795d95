"""How many rows an optimizer step has, as `--rows-per-step` or `--tokens-per-step` say."""

from longctx_patch.planner.job import nearest_multiples


def rows_of_step(rows: int | None, tokens: int | None, seq_len: int) -> int | None:
    """Rows of a step over all GPUs; None if neither option is given.

    Raises ValueError for both options, and for tokens that aren't whole rows.

    Example:
        >>> rows_of_step(None, 2**20, 2**15)
        32
    """
    if tokens is None:
        return rows
    if rows is not None:
        raise ValueError("both --rows-per-step and --tokens-per-step are set. Choose one.")
    if tokens % seq_len:
        raise ValueError(
            f"--tokens-per-step {tokens} with --seq-len {seq_len}: a step has whole rows. Use "
            f"--tokens-per-step {nearest_multiples(tokens, seq_len)}."
        )
    return tokens // seq_len


def forwards_of_step(rows: int | None, num_gpus: int, degree: int) -> int:
    """How many rows each group of `degree` GPUs trains in a step, one after the other.

    Raises ValueError if some groups would have more rows than others.
    """
    at_once = num_gpus // degree
    rows = rows or at_once
    if rows % at_once:
        raise ValueError(
            f"{rows} rows per step with {degree} of {num_gpus} GPUs per row: {at_once} rows are "
            f"trained at once, so a step has a multiple of {at_once}. Use --rows-per-step "
            f"{nearest_multiples(rows, at_once)}, or leave the degrees to `longctx patch`."
        )
    return rows // at_once
