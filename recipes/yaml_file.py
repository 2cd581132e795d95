"""YAML files of settings, read strictly: a name that is given twice would win in silence."""

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

_OTHER_BASES = re.compile(r"[-+]?(0[0-7_]+|[\d_]+(:[0-5]?\d)+(\.[\d_]*)?)")
"""Numbers that YAML 1.1 reads to base 8 or 60: 010 is 8, and 1:30 is 90."""


class _Loader(yaml.SafeLoader):
    """Refuses names that a mapping has twice, and numbers that look like others."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        if is_number and _OTHER_BASES.fullmatch(str(node.value)):
            line = node.start_mark.line + 1
            raise ValueError(
                f"line {line}: YAML reads {node.value} to base 8 or 60. Write the number that is "
                f"meant in plain digits, or a text in quotes: '{node.value}'."
            )
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if isinstance(key, Hashable) and lines.setdefault(key, line) != line:
                raise ValueError(
                    f"line {line}: {key!r} is given twice, first in line {lines[key]}. Leave one "
                    "of them out."
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The names and values of a file; none of an empty one.

    Raises ValueError with the file, and the line where there is one, for what is no such file.
    """
    if not path.is_file():
        raise ValueError(f"{path}: no such file.")
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # it is safe
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start}). Save it anew.") from error
    except yaml.YAMLError as error:
        tab = " YAML is indented by spaces, not by tabs." if "'\\t'" in str(error) else ""
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}.{tab}") from error
    except ValueError as error:
        raise ValueError(f"{path}, {error}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply for settings, which are two deep.") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not lines of 'name: value'.")
    return {str(name): value for name, value in content.items()}
