"""Options: fields of a configuration that users may set, each stated once, with its field.

Type, range and default are the field's own. From the rest (`Option`) follow the keywords of
`rootlace.Runtime` and the options of `rootlace serve`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints


@dataclass(frozen=True)
class Option:
    """How users set a field.

    `keyword` is its name for `rootlace.Runtime` ("": the field's), `aliases` are sglang's names for
    it, and `opposite` is sglang's name for the reverse. `help` is what the command line says of it
    ("": it has no such option); `flag` is its name there ("": `--` and the keyword; a `--no-...`
    turns it off), `shown` the default that the help shows where it is not the field's. A `size` is
    written like 512M on the command line.
    """

    help: str = ""
    keyword: str = ""
    flag: str = ""
    shown: str = ""
    aliases: tuple[str, ...] = ()
    opposite: str = ""
    size: bool = False


def option(default: Any, help: str = "", **details: Any) -> Any:
    """A dataclass field that is an option. `details` are those of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **details)})


@dataclass(frozen=True)
class Setting:
    """An option of a configuration: its `path` leads through nested configurations to the field.

    `default` is the field's; None for a field that has none, which is `required`.
    """

    keyword: str
    path: tuple[str, ...]
    type: Any
    default: Any
    required: bool
    option: Option

    @property
    def names(self) -> tuple[str, ...]:
        """Everything that `rootlace.Runtime` may call it."""
        opposite = (self.option.opposite,) if self.option.opposite else ()
        return (self.keyword, *self.option.aliases, *opposite)

    def put(self, config: dict[str, Any], value: Any) -> None:
        """Write `value` at the setting's place in `config`, a configuration as nested dicts."""
        *path, last = self.path
        for part in path:
            config = config.setdefault(part, {})
        config[last] = value


def settings(config: type, path: tuple[str, ...] = ()) -> Iterator[Setting]:
    """Every option of the dataclass `config` and of the configurations in it, in their order."""
    types = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        place = (*path, field.name)
        if dataclasses.is_dataclass(types[field.name]):
            yield from settings(types[field.name], place)
        elif (found := field.metadata.get("option")) is not None:
            keyword = found.keyword or field.name
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            yield Setting(keyword, place, types[field.name], default, required, found)
