"""Reads a checkpoint's config.json so that nothing in it is overlooked.

Every field is either read (and so honoured), listed as irrelevant, or held against the values that change nothing;
`finish` refuses the rest. A field that would change the maths can never be ignored, not even one not invented yet.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from flare.errors import InputError

_ABSENT = object()


class Fields:
    """One JSON object of a config. `where` is what errors call it: `config.json`, `config.json: rope_scaling`."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def refuse(self, name: str, supported: str) -> InputError:
        """The error for a field whose value is not honoured, to be raised by the caller."""
        value = repr(self._values[name])
        shown = value if len(value) <= 80 else value[:77] + "..."
        return InputError(f"{self._where}: {name} is {shown}, supported: {supported}")

    def raw(self, name: str, default: Any = None) -> Any:
        """The value as it stands, marked as read."""
        self._read.add(name)
        return self._values.get(name, default)

    def integer(self, name: str, *, low: int = 1, high: int = 2**31 - 1, default: Any = _ABSENT) -> Any:
        """An integer in [low, high]. With a default, an absent or null field is the default."""
        value = self._take(name, default)
        if value is default:
            return default
        if type(value) is not int or not low <= value <= high:
            raise self.refuse(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, *, above: float = 0.0, default: Any = _ABSENT) -> Any:
        """A finite number greater than `above` (NaN is not), as given: int or float."""
        value = self._take(name, default)
        if value is default:
            return default
        if type(value) not in (int, float) or not above < value < 1e300:
            raise self.refuse(name, f"a number above {above:g}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """true or false; absent is the default."""
        value = self.raw(name, default)
        if type(value) is not bool:
            raise self.refuse(name, "true or false")
        return value

    def choice(self, name: str, allowed: Collection[str], default: Any = _ABSENT) -> Any:
        """One of a few strings. With a default, an absent or null field is the default."""
        value = self._take(name, default)
        if value is default:
            return default
        if not isinstance(value, str) or value not in allowed:
            raise self.refuse(name, ", ".join(allowed))
        return value

    def finish(
        self, *, irrelevant: Collection[str], harmless: Mapping[str, tuple[Any, ...]], refused: Mapping[str, str]
    ) -> None:
        """Refuses the first field, in the file's order, that was not read and may change the maths.

        irrelevant: fields of any value. harmless: fields by the values that change nothing; null never does.
        refused: what to say is supported instead of the fields that are known and not honoured.
        """
        for name, value in self._values.items():
            if name in self._read or name in irrelevant or value is None:
                continue
            if name in harmless:
                if not any(type(value) is type(h) and value == h for h in harmless[name]):
                    raise self.refuse(name, " or ".join(repr(h) for h in harmless[name]))
                continue
            raise self.refuse(name, refused.get(name, "no such field in this model family"))

    def _take(self, name: str, default: Any) -> Any:
        value = self.raw(name)
        if value is not None:
            return value
        if default is _ABSENT:
            raise InputError(f"{self._where}: {name} is missing")
        return default
