"""What a picture of `longctx plan` or `longctx schedule` needs, checked before anything is done."""

from importlib.util import find_spec
from pathlib import Path


def check_picture(option: str, path: Path, endings: tuple[str, ...]) -> None:
    """Raise ValueError for a picture that could not be written to the path that `option` names."""
    if path.suffix.lower() not in endings:
        stem = "schedule" if path.stem in ("", *endings) else path.stem
        raise ValueError(
            f"{option} {str(path)!r}: the ending chooses the format, one of {', '.join(endings)}. "
            f"Use {option} {str(path.parent / f'{stem}{endings[0]}')!r}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"{option} {str(path)!r}: there is no folder {str(path.parent)!r}, and none is made. "
            "Make it first, or give another folder."
        )
    require_matplotlib(f"{option} {str(path)!r}")


def require_matplotlib(asked: str) -> None:
    """Raise ValueError where it is not installed; `asked` is what wants a picture."""
    if find_spec("matplotlib") is None:
        raise ValueError(
            f"{asked}: pictures are drawn with matplotlib, which is not installed. "
            "Run: pip install longctx-patch[draw]"
        )
