"""Sources give the same records however they are cut, and name file and row of what is wrong."""

import gzip
import json
import os
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from datasets import Dataset, DatasetDict

from longctx_patch.recipes.data import readers, sources
from longctx_patch.recipes.data.addresses import absolute
from longctx_patch.recipes.data.readers import records_of
from longctx_patch.recipes.data.records import BadRecord, Record, kind_of
from longctx_patch.recipes.data.sources import check_apart, check_unchanged, parts_of

RECORDS = [{"text": f"Zeile {n} mit ä", "extra": {"n": n}} for n in range(100)]


def read(source: Path | str) -> list[Record]:
    return [record for part in parts_of(str(source)) for record in records_of(part)]


def write_lines(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_lines_are_read_once_wherever_a_file_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps(record, ensure_ascii=False) for record in RECORDS]
    lines[7:7] = ["", "  "]
    file = write_lines(tmp_path / "a.jsonl", lines)
    for size in (1, 37, 64, 1000, 10**9):
        monkeypatch.setattr(sources, "PART_BYTES", size)
        found = read(file)
        assert [record.fields for record in found] == RECORDS
        assert str(found[6].place) == f"{file}, line 7"
        assert str(found[99].place) == f"{file}, line 102"


def test_tables_are_read_once_wherever_they_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field that only some records have is not filled with None in the others."""
    records = [{"text": "a", "more": {"x": 1}}, {"text": "b", "more": {"y": [None]}}] * 50
    table = Dataset.from_list(records)
    table.save_to_disk(str(tmp_path / "saved"))
    table.to_parquet(str(tmp_path / "a.parquet"))
    pq.write_table(table.data.table, tmp_path / "groups.parquet", row_group_size=13)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.data.table.schema) as file:
        file.write_table(table.data.table)
    stream = next((tmp_path / "saved").glob("*.arrow"))
    stream.rename(tmp_path / "stream.arrow")
    stream.symlink_to(tmp_path / "stream.arrow")
    names = ("saved", "a.parquet", "groups.parquet", "file.arrow", "stream.arrow")
    monkeypatch.setattr(readers, "BATCH_RECORDS", 5)
    for size in (1, 7, 1000):
        monkeypatch.setattr(sources, "PART_RECORDS", size)
        for name in names:
            found = read(tmp_path / name)
            assert [record.fields for record in found] == records
            assert str(found[41].place) == f"{tmp_path / name}, record 42"


def test_of_a_folder_with_tables_the_training_split(tmp_path: Path) -> None:
    """Not its README and not its test split; files of another kind are not dropped in silence."""
    (tmp_path / "data").mkdir()
    for name in ("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001"):
        Dataset.from_dict({"text": [name]}).to_parquet(str(tmp_path / f"data/{name}.parquet"))
    (tmp_path / "README.md").write_text("about")
    found = [record.fields["text"] for record in read(tmp_path)]
    assert found == ["train-00000-of-00002", "train-00001-of-00002"]
    write_lines(tmp_path / "more.jsonl", [json.dumps(RECORDS[0])])
    with pytest.raises(BadRecord, match=r"more\.jsonl: .* Give a glob of the files that are meant"):
        read(tmp_path)
    (tmp_path / "more.jsonl").rename(tmp_path / "more.txt")
    with pytest.raises(BadRecord, match=r"more\.txt: .* Give a glob of the files that are meant"):
        read(tmp_path)
    assert len(read(f"{tmp_path}/data/*.parquet")) == 3


def test_folders_of_which_no_training_split_is_known(tmp_path: Path) -> None:
    table = Dataset.from_dict({"text": ["a"]})
    DatasetDict(test=table).save_to_disk(str(tmp_path / "saved"))
    for name, file in (("other", "test-00000-of-00001.parquet"), ("broken", "a.parquet")):
        (tmp_path / name).mkdir()
        table.to_parquet(str(tmp_path / name / file))
    (tmp_path / "broken" / "README.md").write_text("---\nconfigs: [\n---\n")
    for name, message in (
        ("saved", r"saved has the splits test, and none named train. Name .* \S*saved:test"),
        ("other", r"other has the splits test, and none named train. Name .* \S*other:test"),
        ("broken", "broken: `datasets` can't tell which of its files .* Give a glob"),
    ):
        with pytest.raises(BadRecord, match=message):
            parts_of(str(tmp_path / name))


def test_folders_globs_and_other_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x.txt").write_text("hidden")
    (tmp_path / "b" / "c.txt").write_text("a text", encoding="utf-8")
    (tmp_path / "empty.md").write_text("")
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[:2]))
    (tmp_path / "d.csv").write_text('text,n\n"two\nlines",1\nx,2\n')
    found = [record.fields for record in read(tmp_path)]
    assert found == [
        *RECORDS[:2],
        {"": "a text"},
        {"text": "two\nlines", "n": "1"},
        {"text": "x", "n": "2"},
        {"": ""},
    ]
    assert [record.fields for record in read(f"{tmp_path}/**/*.txt")] == [{"": "a text"}]
    assert str(read(tmp_path / "d.csv")[1].place) == f"{tmp_path / 'd.csv'}, line 4"


GOOD = b'{"text": "a"}\n'
BAD = {
    "cut.jsonl": (GOOD + b'{"text": "b', r"cut.jsonl, line 2: no JSON .*cut short"),
    "null.jsonl": (GOOD + b"\nnull\n", "null.jsonl, line 3: null, not an object"),
    "nan.jsonl": (
        GOOD + b'{"text": "b", "n": NaN}\n',
        "nan.jsonl, line 2: .*n is NaN, which is no n",
    ),
    "bytes.jsonl": (
        GOOD * 1000 + b'{"text": "Z\xfcrich"}\n',
        r"bytes.jsonl, line 1001: not UTF-8 text: byte 0xfc at offset 14011 .* "
        r"iconv -f latin1 -t utf-8 \S*bytes.jsonl > NEW_FILE",
    ),
    "zeros.jsonl": (GOOD + b"\0\0\n", "zeros.jsonl, line 2: a byte 0x00, which no text has"),
    "deep.jsonl": (b"[" * 100_000 + b"\n", "deep.jsonl, line 1: no JSON .*too many to read"),
    "a.json": (GOOD * 2, r"a.json: no JSON .*ending in .jsonl"),
    "b.json": (b'["a"]', "b.json, record 1: a str"),
    "short.csv": (b"text,n\na,1\nb\n", "short.csv, line 3: not as many fields"),
    "long.csv": (b"text,n\na,1,2\n", "long.csv, line 2: not as many fields"),
    "twice.csv": (b"text,text\na,b\n", "twice.csv, line 1: the field 'text' is named twice"),
    "far.csv": (b"text\n" + b"a\n" * 9000 + b"\xfc\n", "far.csv, line 9002: not UTF-8 text"),
    "cut.arrow": (b"ARROW1", "cut.arrow: no arrow file, or one cut short"),
    "cut.parquet": (b"PAR1", "cut.parquet: no parquet file, or one cut short"),
    "far.txt": (b"a\n" * 9000 + b"\xfc", "far.txt, line 9001: not UTF-8 .* offset 18000"),
    "zero.txt": (b"a\n" * 9000 + b"\0", "zero.txt, line 9001: a byte 0x00"),
    "wide.txt": ("a\n".encode("utf-16"), r"wide.txt, line 1: .*If it is UTF-16.*iconv -f utf-16"),
    "pointer.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
    "a.JSONL.gz": (gzip.compress(GOOD), r"a.JSONL.gz: .gz files are not read. Unpack it"),
    "packed.jsonl": (gzip.compress(GOOD), "packed.jsonl holds gzip data, not text. Unpack it"),
    "a.PDF": (b"%PDF-1.4", "a.PDF: .pdf files are not read"),
    "a.GGUF": (b"", r"a.GGUF is a GGUF file, .* As a model, `longctx patch \S*/a.GGUF` says how"),
    "quantised": (b"GGUF\3\0\0\0", "quantised is a GGUF file, a model in the format of llama"),
    "a.bin": (b"abc", "a.bin: .bin files are not read"),
    "a.tsv": (b"text\tn\na\t1\n", r"a.tsv: .tsv files are not read.* as .jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_read_is_named(tmp_path: Path, name: str) -> None:
    content, message = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadRecord, match=message):
        read(tmp_path / name)


def test_names_in_capitals_and_marks_of_byte_order(tmp_path: Path) -> None:
    """A file's kind does not depend on how its name is written, nor on what wrote it."""
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS[:3])
    mark = b"\xef\xbb\xbf"
    for name in ("a.JSONL", "b.Ndjson", "c.jsonlines"):
        (tmp_path / name).write_bytes(mark + lines)
        assert [record.fields for record in read(tmp_path / name)] == RECORDS[:3]
    (tmp_path / "d.JSON").write_bytes(mark + json.dumps(RECORDS[:3]).encode())
    assert [record.fields for record in read(tmp_path / "d.JSON")] == RECORDS[:3]
    Dataset.from_list(RECORDS[:3]).to_parquet(str(tmp_path / "e.PARQUET"))
    assert [record.fields for record in read(tmp_path / "e.PARQUET")] == RECORDS[:3]
    long = "x" * 200_000  # more than Python's csv takes unless it is told
    (tmp_path / "f.CSV").write_bytes(mark + f"text\n{long}\n".encode())
    assert [record.fields for record in read(tmp_path / "f.CSV")] == [{"text": long}]
    (tmp_path / "g.txt").write_bytes(mark + b"a")
    assert [record.fields for record in read(tmp_path / "g.txt")] == [{"": "a"}]


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("b.jsonl", "nowhere", r"b.jsonl is a link to nowhere, where no file is. Mend it"),
        ("b.jsonl", "b.jsonl", r"b.jsonl is a link to b.jsonl, where no file is"),
        ("more", "..", r"more is a link to the folder \.\., .* Give that folder as a source"),
    ],
)
def test_links_that_would_hide_data(tmp_path: Path, name: str, target: str, message: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(GOOD)
    (folder / name).symlink_to(target)
    with pytest.raises(BadRecord, match=message):
        read(folder)


def test_a_source_that_is_a_link_to_itself_has_no_data(tmp_path: Path) -> None:
    """`Path.resolve` raises a RuntimeError of it before Python 3.13."""
    link = tmp_path / "a.jsonl"
    link.symlink_to(link)
    assert absolute(str(link)) == str(link)
    check_apart(tmp_path / "out", [str(link)])
    with pytest.raises(BadRecord, match=r"a link to .*a\.jsonl, where no file is|no data at"):
        read(link)


def test_files_that_the_system_does_not_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found when a file is first looked at, or when a disk fails in the middle of it."""
    file = write_lines(tmp_path / "a.jsonl", ['{"text": "a"}'])
    parts = parts_of(str(file))

    def denied(path: Any, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.open", denied)
        with pytest.raises(BadRecord, match=r"a.jsonl can't be read \(Permission denied\)"):
            parts_of(str(file))
    file.unlink()
    with pytest.raises(BadRecord, match=r"a.jsonl can't be read \(No such file"):
        list(records_of(parts[0]))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match=f"no data at '{source}': it is no file"):
            parts_of(str(source))


NAMES = ["a b.jsonl", "ü ñ.jsonl", "new\nline.jsonl", "a'b\"c.jsonl", "[x]*.jsonl", "-a.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_any_kind_are_read_and_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(GOOD + b"x\n")
    with pytest.raises(BadRecord) as raised:
        read(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path / name}, line 2: no JSON")


def test_an_output_within_the_data(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for output in (data, data / "run" / "training", f"{data}/../data/x"):
        with pytest.raises(ValueError, match=r"lies in .*data, which is read as data"):
            check_apart(output, [str(data)])
    (tmp_path / "link").symlink_to(data)
    with pytest.raises(ValueError, match="Give an output beside it"):
        check_apart(tmp_path / "link" / "run", ["owner/name", str(data)])
    for output in (tmp_path / "run", data / ".runs" / "a", tmp_path / "data2"):
        check_apart(output, [str(data), str(data / "*.txt")])


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", ['{"text": "a"}'])
    parts = parts_of(str(tmp_path))
    check_unchanged(parts)
    with file.open("a") as opened:
        opened.write('{"text": "b"}\n')
    with pytest.raises(BadRecord, match=r"a.jsonl was changed while it was read"):
        check_unchanged(parts)


def test_a_source_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no data at .*no name of a dataset on the hub"):
        read(tmp_path / "nothing")

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        BadRecord, match=r"no file or folder here, and no dataset .*: owner/name: no network"
    ):
        read("owner/name")
    with pytest.raises(BadRecord, match="is named so: owner/name:CONFIG/SPLIT"):
        read("owner/name@main:config/test")


def test_a_file_that_is_read_whole_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of lines has none: it is read in parts."""
    monkeypatch.setattr(readers, "MOST_BYTES", 20)
    for name, content in (("a.json", json.dumps(RECORDS[:2])), ("a.txt", "a" * 21)):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadRecord, match=rf"{name} has .* bytes, .* up to 20. Write it as .js"):
            read(tmp_path / name)
    assert len(read(write_lines(tmp_path / "a.jsonl", [json.dumps(RECORDS[0])] * 9))) == 9


def test_kinds_of_records() -> None:
    def kind(**fields: object) -> str:
        return kind_of(Record(fields, "here"), "content")

    assert kind(content="a") == "text"
    assert kind(messages=[], content="a") == "chat"
    assert kind(conversations=[]) == "chat"
    assert kind(prompt="a", completion="b") == "completion"
    assert kind(prompt="a", chosen="b", rejected="c", messages=None) == "preference"
    assert kind(input_ids=[1], labels=[2]) == "tokens"
    with pytest.raises(
        BadRecord, match=r"here: no text in field 'content', there is: text. .*--text-field text"
    ):
        kind(text="a")
    with pytest.raises(BadRecord, match=r"here: .*there is: n. A record has `input_ids`"):
        kind(n=1)
