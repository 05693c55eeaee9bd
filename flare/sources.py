"""Where settings come from: their defaults, a configuration file, the environment, the options; later ones win. Or the
arguments of `flare.open` alone."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from flare import __version__
from flare.config import (
    MIB,
    RuntimeSettings,
    ServerSettings,
    others_may,
    parse_memory_size,
    read_api_key,
    read_trusted,
    usable_cpus,
)
from flare.errors import InputError, SettingError
from flare.settings import BY_NAME, PATH_CHARS, SETTINGS, TABLES, Setting, checked_text, seen, toml_value

PREFIX = "FLARE_"
CONFIG_VARIABLE = "FLARE_CONFIG"
REQUIRE_DEVICE_VARIABLE = "FLARE_REQUIRE_DEVICE_KERNELS"
"""A switch that is `cpu_fallback` turned off, and goes before that one's own variable. Turned off itself, it says nothing."""

MAX_FILE_BYTES = MIB
FOREIGN = (
    r"(?s:FLARE_((\w+_)?SERVICE_(HOST|PORT(_\w+)?)=.*|(\w+_)?PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?=.*|=(tcp|udp|sctp)://.*)"
    r"|(\w+_)?TESTS?(_\w+)?=.*))"
)
"""Variables, with their values, that others name so: Kubernetes tells every container of a service called `flare`, and test
suites have theirs."""


class Given(NamedTuple):
    """A value and its source: "default", "file", the name of a variable, an option, or "argument"."""

    value: Any
    source: str


class Configuration:
    """All settings with their values. `warnings` are lines for people about what was given but has no effect, or no good."""

    def __init__(self, values: Mapping[str, Given], warnings: list[str], file: Path | None) -> None:
        self.values = values
        self.warnings = warnings
        self._file = file

    def __getitem__(self, name: str) -> Any:
        return self.values[name].value

    def place(self, name: str) -> str:
        """Returns where a setting's value was given, as errors name it: file and key, variable, option, or just its name.

        Of a default it is the option by which another value would be given.
        """
        setting, (value, source) = BY_NAME[name], self.values[name]
        if value is False and source == setting.flag:
            return f"--no-{setting.flag.removeprefix('--')}"
        if source == "file":
            return f"{self._file}: {setting.key}"
        return {"argument": name, "default": setting.flag or name}.get(source, source)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Puts the place of a setting before the line that says that what it asks for cannot be had."""
        try:
            yield
        except SettingError as error:
            raise InputError(f"{self.place(error.setting)}: {error}") from None

    def runtime(self) -> RuntimeSettings:
        """Returns how the core is loaded. Raises InputError when no core is named."""
        if self["core"] is None:
            raise InputError(
                "no core: name its directory as CORE, in the variable FLARE_CORE, or in a configuration file as "
                "[runtime] core"
            )
        return RuntimeSettings(
            core=self["core"],
            threads=self["threads"],
            kv_memory=None if self["kv_memory"] is None else parse_memory_size(self["kv_memory"]),
            huge_pages=self["huge_pages"],
            verify=self["verify"],
            aliases=self["aliases"],
            max_tokens=self["max_tokens"],
            max_waiting=self["max_waiting"],
            strict_tools=self["strict_tools"],
            thinking_token_budget=self["thinking_token_budget"],
            temperature=self["temperature"],
            check=self["check"],
            cpu_fallback=self["cpu_fallback"],
        )

    def server(self) -> ServerSettings:
        """Returns how the server listens and what it bounds; reads the key's file.

        Raises InputError for a key file that is none or that every user may change, and for bounds that contradict each
        other.
        """
        largest, all_together = self["max_body_bytes"], self["max_bodies_bytes"]
        if all_together < largest:
            raise InputError(
                f"{self.place('max_bodies_bytes')}: {all_together} is less than {largest} of "
                f"{self.place('max_body_bytes')}: no largest body would ever be read; raise the one or lower the other"
            )
        key = self["api_key"]
        if self["api_key_file"] is not None:
            key = read_api_key(Path(self["api_key_file"]), self.place("api_key_file"))
        return ServerSettings(
            api_key=key,
            **{s.name: self[s.name] for s in SETTINGS if s.name in ServerSettings.__slots__ and s.name != "api_key"},
        )

    def key_warnings(self, settings: ServerSettings) -> list[str]:
        """Returns a warning where every user of the machine can read the key of `settings`, which `server` returned."""
        file = self._file if self["api_key_file"] is None else Path(self["api_key_file"])
        if settings.api_key and file is not None and others_may(file, stat.S_IROTH):
            return [f"{file}: every user of this machine can read the key in it; chmod o-r it"]
        return []

    def toml(self) -> str:
        """Returns all settings as a configuration file, each with its source. Paths are absolute. The key stands in it as
        a comment without its value."""
        lines = [f"# flare {__version__}: the settings in effect, each with its source"]
        for table in TABLES:
            lines += ["", f"[{table}]"]
            lines += [self._line(setting) for setting in SETTINGS if setting.table == table]
        return "\n".join(lines) + "\n"

    def _line(self, setting: Setting) -> str:
        given = self.values[setting.name]
        value, source = given.value, given.source
        if source == "default" and setting.without:
            source = f"default: {setting.without}"
        if value is None or (source.startswith("default") and value in ("", ())):
            return f"# {setting.name}  # {source}"
        if setting.secret:
            return f'# {setting.name} = "***"  # {source}; not shown'
        if setting.is_path:
            value = os.path.abspath(value)
        return f"{setting.name} = {toml_value(value)}  # {source}"


def defaults(source: str) -> dict[str, Given]:
    values = {setting.name: Given(setting.default, source) for setting in SETTINGS}
    return values | {"threads": Given(usable_cpus(), source)}


def configure(
    options: Mapping[str, object], environment: Mapping[str, str] = os.environ, *, config: str | None = None
) -> Configuration:
    """Returns the configuration of a start.

    `options` has the given ones by their settings' names, text or, where it is no text, of the setting's type. `config` names
    the file; without it, the variable FLARE_CONFIG may. Raises InputError naming the place of a bad value, and for keys of
    the file that are no settings.
    """
    values = defaults("default")
    source = "--config" if config is not None else CONFIG_VARIABLE
    name = config if config is not None else environment.get(CONFIG_VARIABLE) or None
    file = None
    if name is not None:
        file = config_path(name, source)
        values |= read_file(file)
    from_environment, warnings = read_environment(environment)
    values |= from_environment
    for option, value in options.items():
        setting = BY_NAME[option]
        read = setting.kind.parse if isinstance(value, str) else setting.kind.read
        values[option] = Given(setting.accept(setting.flag, value, read), setting.flag)
    return Configuration(values, warnings, file)


def given_here(core: str, settings: Mapping[str, object]) -> Configuration:
    """Returns the configuration of `flare.open`: neither a file nor the environment is read.

    Raises InputError naming the argument, for a bad value and for one that is no setting or of no use within a process.
    """
    values = defaults("argument")
    here = [setting.name for setting in SETTINGS if not setting.listens and setting.name != "core"]
    for name, value in {"core": core, **settings}.items():
        setting = BY_NAME.get(name)
        if setting is None:
            from difflib import get_close_matches

            close = get_close_matches(name, here, n=1, cutoff=0.7)
            hint = f"; is {close[0]} meant?" if close else ""
            raise InputError(f"{seen(name)[1:-1]}: no setting of `flare.open`{hint}")
        if setting.listens:
            raise InputError(f"{name}: a setting of the HTTP server; `flare.open` listens to nobody, leave it out")
        given = list(value) if isinstance(value, tuple) else value
        values[name] = Given(setting.accept(name, given, setting.kind.read), "argument")
    return Configuration(values, [], None)


def config_path(name: str, source: str) -> Path:
    try:
        return Path(checked_text(name, PATH_CHARS))
    except ValueError:
        raise InputError(f"{source}: {seen(name)} is no path") from None


def read_file(path: Path) -> dict[str, Given]:
    """Reads the settings of a configuration file. Raises InputError naming the file and the key."""
    values: dict[str, Given] = {}
    for table, content in load_toml(path).items():
        if table not in TABLES:
            raise InputError(f"{path}: {seen(table)} is no table of settings{place_hint(table)}")
        if not isinstance(content, dict):
            raise InputError(f"{path}: {table} is a table: its settings stand below a line [{table}]")
        for name, value in content.items():
            setting = BY_NAME.get(name)
            if setting is None or setting.table != table:
                raise InputError(f"{path}: [{table}] has no setting {seen(name)}{place_hint(name)}")
            value = setting.accept(f"{path}: {setting.key}", value, setting.kind.read)
            if setting.is_path:
                value = os.path.join(path.parent, value)
            values[name] = Given(value, "file")
    if "api_key" in values and "api_key_file" in values:
        raise InputError(f"{path}: [server] has both api_key and api_key_file; one of them holds the key")
    return values


def load_toml(path: Path) -> dict[str, Any]:
    """Reads a TOML file. Raises InputError when that cannot be, or when every user of the machine may write it."""
    import tomllib

    data = read_trusted(path, MAX_FILE_BYTES, str(path))
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        # The library's own words may quote the file, and a key may be in it.
        if found := re.search(r"at line (\d+), column (\d+)", str(error)):
            raise InputError(f"{path}: line {found[1]}, column {found[2]}: not TOML, or a key given twice") from None
        if isinstance(error, tomllib.TOMLDecodeError):
            raise InputError(f"{path}: not TOML at its end, or a key given twice there") from None
        raise InputError(f"{path}: a number is too long, or arrays are nested too deep") from None


def place_hint(name: str) -> str:
    """Returns where a misplaced setting belongs, or the names that a misspelt one comes close to."""
    if name in BY_NAME:
        return f"; it belongs below [{BY_NAME[name].table}]"
    from difflib import get_close_matches

    close = get_close_matches(name, [*BY_NAME, *TABLES], n=1, cutoff=0.7)
    return f"; is {close[0]} meant?" if close else f"; there are the tables {' and '.join(TABLES)}"


def read_environment(environment: Mapping[str, str]) -> tuple[dict[str, Given], list[str]]:
    """Returns the settings that variables give, and a warning for each variable that looks like one and is none.

    An empty variable gives nothing. Raises InputError naming the variable of a bad value, and for a key, which is not taken
    from here: without it the server would be open.
    """
    values: dict[str, Given] = {}
    warnings = []
    known = {setting.variable: setting for setting in SETTINGS if not setting.secret}
    secrets = {PREFIX + setting.name.upper() for setting in SETTINGS if setting.secret}
    for variable in sorted(name for name in environment if name.startswith(PREFIX)):
        text = environment[variable]
        if not text or variable == CONFIG_VARIABLE or re.fullmatch(FOREIGN, f"{variable}={text}"):
            continue
        if variable in secrets:
            raise InputError(f"{variable}: keys are not taken from the environment; name a file in {variable}_FILE")
        if variable == REQUIRE_DEVICE_VARIABLE:
            setting = BY_NAME["cpu_fallback"]
            if setting.accept(variable, text, setting.kind.parse):
                values[setting.name] = Given(False, variable)
        elif variable in known:
            setting = known[variable]
            values[setting.name] = Given(setting.accept(variable, text, setting.kind.parse), variable)
        else:
            from difflib import get_close_matches

            close = get_close_matches(variable, known, n=1, cutoff=0.8)
            hint = f"; is {close[0]} meant?" if close else ""
            warnings.append(f"the variable {seen(variable)[1:-1]} is no setting and has no effect{hint}")
    return values, warnings
