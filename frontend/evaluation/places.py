"""YAML and JSON lines; what is wrong in them is told with the file, the line and the key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rootlace.wire.errors import InvalidRequest

Struct = TypeVar("Struct", bound=msgspec.Struct)
Keys = tuple[str, ...]

_PLACE = re.compile(r"^(?P<reason>.*?)(?: - at (?P<key>`key` in )?`\$(?P<keys>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?P<kind>unknown|missing required) field `(?P<name>.*)`")


class Document:
    """A YAML file: its `content`, a mapping, and the line of each key. Raises InvalidRequest."""

    def __init__(self, path: Path) -> None:
        import yaml

        self.path = path
        self._lines: dict[Keys, int] = {}
        try:
            text = path.read_text("utf-8")
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            self._number(node, ())
            content = yaml.safe_load(text)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise InvalidRequest(f"{path}:{line}: {error.problem}") from None
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise InvalidRequest(f"{path}: {error}") from None
        if not isinstance(content, dict):
            raise InvalidRequest(f"{path}:1: a task is a mapping of keys to values")
        self.content: dict[str, Any] = content

    def _number(self, node: Any, keys: Keys) -> None:
        import yaml

        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = (*keys, str(key.value))
                if inner in self._lines:
                    raise InvalidRequest(
                        f"{self.path}:{key.start_mark.line + 1}: {key.value}: given twice"
                    )
                self._lines[inner] = key.start_mark.line + 1
                self._number(value, inner)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self._lines[*keys, str(index)] = item.start_mark.line + 1
                self._number(item, (*keys, str(index)))

    def wrong(self, keys: Keys, reason: str) -> InvalidRequest:
        """The error that says what is wrong with the value of `keys`."""
        place, known = "", keys
        while known and known not in self._lines:
            known = known[:-1]
        if known:
            place = f":{self._lines[known]}"
        return InvalidRequest(f"{self.path}{place}: {'.'.join(keys)}: {reason}")


def convert(given: Mapping[str, Any], kind: type[Struct]) -> tuple[Struct | None, Keys, str]:
    """`given` as a `kind`; or None, the keys of what is wrong, and what that is."""
    try:
        return msgspec.convert(given, kind), (), ""
    except msgspec.ValidationError as error:
        found = _PLACE.match(str(error))
        assert found is not None
        keys = tuple(re.findall(r"[^.\[\]]+", found["keys"] or ""))
        reason = f"a key: {found['reason']}" if found["key"] else found["reason"]
        field = _FIELD.search(reason)
        if field:
            keys = (*keys, field["name"])
            near = get_close_matches(field["name"], _names(kind), n=1)
            reason = "there is no such key" + (f"; did you mean {near[0]!r}?" if near else "")
            if field["kind"] != "unknown":
                reason = "is missing"
        return None, keys, reason


def _names(kind: type[msgspec.Struct]) -> list[str]:
    """Of all fields, those of structs inside included."""
    names = []
    for each in msgspec.structs.fields(kind):
        names.append(each.encode_name)
        if isinstance(each.type, type) and issubclass(each.type, msgspec.Struct):
            names += _names(each.type)
    return names


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number of the line, its object) for each line of JSON. Raises InvalidRequest."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _object(line, path, number)
    except OSError as error:
        raise InvalidRequest(f"{path}: {error.strerror or error}") from None


def _object(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path}:{number}: {error}") from None
    if not isinstance(found, dict):
        raise InvalidRequest(f"{path}:{number}: a row is an object, not {line.strip()[:40]!r}")
    return found
