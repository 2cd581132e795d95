"""What to say of a file that is no UTF-8 text: where, and what to type."""

import codecs
import shlex
from collections.abc import Iterable

ZERO_BYTE = "a byte 0x00, which no text has: the file is binary, or was damaged."
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def not_utf8(path: str) -> str:
    """The refusal, with the first byte that is wrong. The file is read up to there."""
    with open(path, "rb") as file:
        wide = file.read(2) in UTF_16
        file.seek(0)
        line, offset, byte = _first_wrong(file)
    name, encoding = ("UTF-16", "utf-16") if wide else ("Latin-1", "latin1")
    return (
        f"{path}, line {line}: not UTF-8 text: byte 0x{byte:02x} at offset {offset} of the file. "
        f"If it is {name}, write it anew: iconv -f {encoding} -t utf-8 {shlex.quote(path)} > "
        "NEW_FILE"
    )


def _first_wrong(lines: Iterable[bytes]) -> tuple[int, int, int]:
    """(line, offset, byte) of the first byte that can't be decoded."""
    start = 0
    for number, line in enumerate(lines, start=1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return number, start + error.start, line[error.start]
        start += len(line)
    raise ValueError("the file was changed while it was read")
