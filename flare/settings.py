"""What an operator may set: one table, from which the options, the variables, the keys of a configuration file, their
checks and the tables of the documentation come.

A setting's value is given as text (an option, a variable) or as a value of TOML; its kind reads both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, Protocol

from flare.config import (
    MAX_KEY_BYTES,
    MAX_THREADS,
    MIB,
    RuntimeSettings,
    ServerSettings,
    check_api_key,
    parse_bytes,
    parse_memory_size,
)
from flare.core.sampling import VALID
from flare.errors import InputError

SHOWN_CHARS = 60
MAX_ALIASES = 64
ALIAS_CHARS = 256
HOST_CHARS = 253  # of a DNS name
PATH_CHARS = 4096
SWITCH_WORDS = {"true": True, "1": True, "false": False, "0": False}


class Kind(Protocol):
    """How a setting's values are read. `noun` and `bound` make an error's end: "is not NOUN BOUND".

    Both methods return the value and raise ValueError, without words, for what is none; `read` takes a value of TOML.
    """

    @property
    def noun(self) -> str: ...
    @property
    def bound(self) -> str: ...
    def parse(self, text: str) -> Any: ...
    def read(self, value: object) -> Any: ...


def check(good: bool) -> None:
    if not good:
        raise ValueError


def checked_text(value: object, most: int) -> str:
    """Returns text of 1 to `most` characters that can stand in a log line: none of them is a control character."""
    if not isinstance(value, str):
        raise ValueError
    check(1 <= len(value) <= most and not re.search(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]", value))
    value.encode()  # what is not UTF-8 comes from the system with lone surrogates; UnicodeEncodeError is a ValueError
    return value


class Whole(NamedTuple):
    low: int
    high: int

    @property
    def noun(self) -> str:
        return "a whole number"

    @property
    def bound(self) -> str:
        return f"from {self.low} to {self.high}"

    def parse(self, text: str) -> int:
        return self.read(int(text))

    def read(self, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError
        check(self.low <= value <= self.high)
        return value


class Bytes(Whole):
    __slots__ = ()

    @property
    def noun(self) -> str:
        return "a number of bytes, or a size such as 32MiB,"

    def parse(self, text: str) -> int:
        return self.read(parse_bytes(text))

    def read(self, value: object) -> int:
        return Whole.read(self, parse_bytes(value) if isinstance(value, str) else value)


class Number(NamedTuple):
    low: float
    high: float

    @property
    def noun(self) -> str:
        return "a number"

    @property
    def bound(self) -> str:
        return f"from {self.low:g} to {self.high:g}"

    def parse(self, text: str) -> float:
        return self.read(float(text))

    def read(self, value: object) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError
        check(self.low <= value <= self.high)
        return float(value)


class Seconds(Number):
    __slots__ = ()

    @property
    def noun(self) -> str:
        return "a number of seconds"


class Memory:
    """A size, or a share of what is free; its value is the text, since a share means something only at load."""

    noun = "a size such as 2GiB or 800MB, or a share of the free memory"
    bound = "up to 95%"

    def parse(self, text: str) -> str:
        size = checked_text(text.strip(), SHOWN_CHARS)
        try:
            parse_memory_size(size)
        except InputError:
            raise ValueError from None
        return size

    def read(self, value: object) -> str:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError
        return self.parse(str(value))


class Switch:
    noun = "a switch:"
    bound = "true or false"

    def parse(self, text: str) -> bool:
        word = text.strip().lower()
        check(word in SWITCH_WORDS)
        return SWITCH_WORDS[word]

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError
        return value


class Text(NamedTuple):
    """Printable text. `is_path`: a relative one in a configuration file begins at the file's directory."""

    noun: str
    most: int
    is_path: bool = False

    @property
    def bound(self) -> str:
        return f"of 1 to {self.most} printable characters"

    def parse(self, text: str) -> str:
        return checked_text(text, self.most)

    def read(self, value: object) -> str:
        return checked_text(value, self.most)


class Choice(NamedTuple):
    words: tuple[str, ...]

    @property
    def noun(self) -> str:
        return "one of"

    @property
    def bound(self) -> str:
        return ", ".join(self.words)

    def parse(self, text: str) -> str:
        return self.read(text)

    def read(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError
        return value


class Names:
    """Names of the model; empty ones are left out. As text they are separated by commas."""

    noun = "a list of names,"
    bound = f"at most {MAX_ALIASES}, of 1 to {ALIAS_CHARS} printable characters each"

    def parse(self, text: str) -> tuple[str, ...]:
        return self.read([name.strip() for name in text.split(",")])

    def read(self, value: object) -> tuple[str, ...]:
        if not isinstance(value, list):
            raise ValueError
        names = tuple(checked_text(name, ALIAS_CHARS) for name in value if name != "")
        check(len(names) <= MAX_ALIASES)
        return names


class Key:
    noun = "one word of printable ASCII characters,"
    bound = f"at most {MAX_KEY_BYTES}"

    def parse(self, text: str) -> str:
        return check_api_key(text)

    def read(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError
        return check_api_key(value)


def value_of_field(name: str) -> Any:
    """Returns the default that the field of that name has in RuntimeSettings or ServerSettings, None without one."""
    for owner in (RuntimeSettings, ServerSettings):
        for declared in fields(owner):
            if declared.name == name:
                return None if declared.default is MISSING else declared.default
    return None


class Setting(NamedTuple):
    """One setting. `table` and `name` are its place in a configuration file, `option` its option with the metavariable.

    `without` says what holds where neither is a value given nor is there a default. A `secret` is never shown, and is
    given in a file only: other processes see a process's options, and its children inherit its variables. What `listens`
    is of sockets and keys: `flare.open` does not take it.
    """

    name: str
    table: str
    kind: Kind
    help: str
    option: str = ""
    without: str = ""
    secret: bool = False
    listens: bool = False

    @property
    def key(self) -> str:
        return f"[{self.table}] {self.name}"

    @property
    def flag(self) -> str:
        return self.option.partition(" ")[0]

    @property
    def variable(self) -> str:
        return "" if self.secret else f"FLARE_{self.name.upper()}"

    @property
    def is_path(self) -> bool:
        return isinstance(self.kind, Text) and self.kind.is_path

    @property
    def default(self) -> Any:
        return value_of_field(self.name)

    @property
    def default_text(self) -> str:
        return self.without or toml_value(self.default).strip('"')

    def accept(self, place: str, value: object, read: Callable[[Any], Any]) -> Any:
        """Returns the value that one of the kind's methods makes of `value`. Raises InputError naming `place`."""
        try:
            return read(value)
        except ValueError:
            shown = "this value" if self.secret else seen(value)
            raise InputError(f"{place}: {shown} is not {self.kind.noun} {self.kind.bound}") from None


def seen(value: object) -> str:
    """Returns a value in the few words that an error shows of it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return repr(value) if len(value) <= SHOWN_CHARS else repr(value[:SHOWN_CHARS]) + "..."
    if isinstance(value, int) and value.bit_length() > 128:
        return "this huge number"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "this array"
    return "this table" if isinstance(value, dict) else "this date or time"


def toml_value(value: Any) -> str:
    """Returns a setting's value in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'  # the kinds let no control character through
    if isinstance(value, tuple):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    return repr(value)


SETTINGS = (
    Setting("core", "runtime", Text("a path", PATH_CHARS, is_path=True), "directory of the core", "CORE", "none"),
    Setting("threads", "runtime", Whole(1, MAX_THREADS), "kernel threads", "--threads N", "all usable CPUs"),
    Setting(
        "kv_memory",
        "runtime",
        Memory(),
        "memory for keys and values: 2GiB, 800MB, or 40% of what is free beside the weights; "
        "at most every slot's full context",
        "--kv-memory SIZE",
        "half of what is free beside the weights, 90% on a device",
    ),
    Setting("max_tokens", "runtime", Whole(1, 2**31 - 1), "most tokens of one answer", "--max-tokens N", "no limit"),
    Setting("max_waiting", "runtime", Whole(1, 65536), "requests that wait for a slot, beyond those that run"),
    Setting("huge_pages", "runtime", Switch(), "copy the weights into huge pages at load", "--huge-pages"),
    Setting("verify", "runtime", Switch(), "hash every byte of the weights at load", "--verify"),
    Setting(
        "cpu_fallback", "runtime", Switch(), "let the processor run what has no device or no kernel", "--cpu-fallback"
    ),
    Setting("host", "server", Text("an address", HOST_CHARS), "address to listen on", "--host HOST", listens=True),
    Setting("port", "server", Whole(0, 65535), "port; 0 takes a free one", "--port N", listens=True),
    Setting("api_key", "server", Key(), "key that clients must send", without="no key", secret=True, listens=True),
    Setting(
        "api_key_file",
        "server",
        Text("a path", PATH_CHARS, is_path=True),
        "file with the key that clients must send; goes before api_key, an empty file asks for none",
        "--api-key-file FILE",
        "no key",
        listens=True,
    ),
    Setting(
        "aliases",
        "server",
        Names(),
        "names of the model towards clients, the first one is shown",
        "--alias NAME",
        "the core's model id",
    ),
    Setting(
        "strict_tools",
        "server",
        Choice(("refuse", "relax")),
        "functions with `strict: true` are refused, or taken as ones without",
        "--strict-tools MODE",
    ),
    Setting(
        "thinking_token_budget",
        "server",
        Whole(1, 2**31 - 1),
        "most tokens of reasoning in a chat answer whose request sets no budget",
        "--thinking-token-budget N",
        "no limit",
    ),
    Setting(
        "temperature",
        "server",
        Number(0, VALID["temperature"][1]),
        "temperature of requests that name none; 0 takes the likeliest tokens",
        "--temperature T",
        "the core's",
    ),
    Setting("check", "server", Switch(), "replay the core's prompts with known answers before serving", "--check"),
    Setting("max_body_bytes", "server", Bytes(1024, 1024 * MIB), "largest request body, as sent and as decoded"),
    Setting(
        "max_bodies_bytes",
        "server",
        Bytes(1024, 65536 * MIB),
        "all bodies together that are being read or decoded; at least max_body_bytes",
    ),
    Setting(
        "max_requests", "server", Whole(1, 65536), "choices that are in the server: waiting, running or not yet read"
    ),
    Setting("max_connections", "server", Whole(1, 65536), "open connections", listens=True),
    Setting("frontend_threads", "server", Whole(1, 64), "threads that decode, render and tokenize requests"),
    Setting("body_silence_s", "server", Seconds(0.1, 3600), "how long a body may pause", listens=True),
    Setting("body_total_s", "server", Seconds(0.1, 86400), "how long a body may take as a whole", listens=True),
    Setting(
        "keepalive_comment_s",
        "server",
        Seconds(0.1, 3600),
        "silence of a stream before a comment line is sent",
        listens=True,
    ),
    Setting(
        "keepalive_s",
        "server",
        Seconds(0.1, 86400),
        "how long a connection is kept open without a request",
        listens=True,
    ),
    Setting(
        "shutdown_s",
        "server",
        Seconds(0.1, 3600),
        "how long the last bytes may take when the server stops",
        listens=True,
    ),
)
BY_NAME = {setting.name: setting for setting in SETTINGS}
TABLES = ("runtime", "server")
