"""Names that a user gives: one that does not exist is refused, with the nearest that does."""

from collections.abc import Iterable


def require_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise `ValueError` unless `value`, given for the option `name`, is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{name}={value!r}: choose one of {', '.join(choices)}.{did_you_mean(value, choices)}"
        )


def did_you_mean(value: object, choices: Iterable[str]) -> str:
    """A sentence, after a space, that names the choice nearest to `value`; "" if none is near."""
    from difflib import get_close_matches  # needed for an error alone

    spelled = {choice.lower(): choice for choice in choices}
    near = get_close_matches(str(value).lower(), spelled, n=1)
    return f" Did you mean {spelled[near[0]]!r}?" if near else ""
