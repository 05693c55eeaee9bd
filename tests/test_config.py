"""Each setting from a file, the environment and options: which of them wins, and which values are refused."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.cli import configured, make_parser
from flare.config import MIB, MemorySize, RuntimeSettings, ServerSettings, usable_cpus
from flare.errors import InputError
from flare.settings import BY_NAME, SETTINGS, TABLES, Setting, Switch
from flare.sources import Configuration, configure
from tests.support.configuration import from_file, refusal, write

KEY = "sk-1"

# Two values of each setting: in TOML, and as text of a variable or an option.
SAMPLES: dict[str, list[tuple[str, str]]] = {
    "core": [('"/srv/one"', "/srv/one"), ('"/srv/two"', "/srv/two")],
    "threads": [("3", "3"), ("256", "256")],
    "kv_memory": [('"40%"', "40%"), ("1048576", "1048576")],
    "max_tokens": [("1", "1"), ("2147483647", "2147483647")],
    "max_waiting": [("1", "1"), ("65536", "65536")],
    "huge_pages": [("true", "TRUE"), ("false", "0")],
    "verify": [("true", "1"), ("false", "false")],
    "cpu_fallback": [("false", "0"), ("true", "1")],
    "host": [('"::1"', "::1"), ('"localhost"', "localhost")],
    "port": [("0", "0"), ("65535", "65535")],
    "api_key_file": [('"/run/one"', "/run/one"), ('"/run/two"', "/run/two")],
    "aliases": [('["a/b", "", "c d"]', "a/b,, c d"), ('["x"]', "x")],
    "strict_tools": [('"relax"', "relax"), ('"refuse"', "refuse")],
    "thinking_token_budget": [("1", "1"), ("2147483647", "2147483647")],
    "temperature": [("0.25", "0.25"), ("0", "0")],
    "check": [("true", "1"), ("false", "false")],
    "max_body_bytes": [("1024", "1KiB"), ('"1GiB"', "1073741824")],
    "max_bodies_bytes": [('"2GiB"', "2 GiB"), ("1024", "1024")],
    "max_requests": [("1", "1"), ("65536", "65536")],
    "max_connections": [("1", "1"), ("65536", "65536")],
    "frontend_threads": [("1", "1"), ("64", "64")],
    "body_silence_s": [("0.1", "0.1"), ("3600", "3600")],
    "body_total_s": [("0.5", "0.5"), ("86400.0", "8.64e4")],
    "keepalive_comment_s": [("1", "1"), ("2.5", "2.5")],
    "keepalive_s": [("1", "1"), ("2.5", "2.5")],
    "shutdown_s": [("1", "1"), ("2.5", "2.5")],
}
OPEN = [setting for setting in SETTINGS if not setting.secret]
WITH_OPTION = [setting for setting in OPEN if setting.flag]


def from_options(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Configuration:
    for name in [name for name in os.environ if name.startswith("FLARE_")]:
        monkeypatch.delenv(name)
    return configured(make_parser().read(["serve", *arguments]))


def option(setting: Setting, text: str) -> list[str]:
    """The arguments that give a setting."""
    if setting.name == "core":
        return [text]
    if isinstance(setting.kind, Switch):
        return [setting.flag if setting.kind.parse(text) else setting.flag.replace("--", "--no-", 1)]
    if setting.name == "aliases":
        return [argument for name in text.split(",") for argument in (setting.flag, name.strip())]
    return [setting.flag, text]


def test_all_that_the_program_runs_with_can_be_set() -> None:
    taken = {field.name for owner in (RuntimeSettings, ServerSettings) for field in fields(owner)}
    assert {setting.name for setting in SETTINGS} == taken | {"api_key_file"}
    assert set(SAMPLES) | {"api_key"} == set(BY_NAME)
    assert len({setting.flag for setting in WITH_OPTION}) == len(WITH_OPTION)


def test_without_anything_the_defaults_hold() -> None:
    configuration = configure({"core": "c"}, {})
    assert configuration.server() == ServerSettings()
    assert configuration.runtime() == RuntimeSettings(core="c", threads=usable_cpus())
    assert configuration.warnings == []
    with pytest.raises(InputError, match=r"no core.*\[runtime\] core"):
        configure({}, {}).runtime()


@pytest.mark.parametrize("setting", OPEN, ids=lambda setting: setting.name)
def test_a_setting_by_each_way(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for literal, text in SAMPLES[setting.name]:
        file = from_file(tmp_path, f"[{setting.table}]\n{setting.name} = {literal}\n")
        variable = configure({}, {setting.variable: text})
        assert file.values[setting.name].source == "file"
        assert variable.values[setting.name].source == setting.variable == f"FLARE_{setting.name.upper()}"
        assert file[setting.name] == variable[setting.name] is not None
        if setting.flag:
            given_option = from_options(option(setting, text), monkeypatch)
            assert given_option.values[setting.name] == (file[setting.name], setting.flag)
        others = {other.name for other in SETTINGS if other != setting and other.name != "threads"}
        assert all(file.values[name].source == variable.values[name].source == "default" for name in others)


def test_values_reach_what_the_program_runs_with(tmp_path: Path) -> None:
    """Every field of both, by the second sample and by the key, differs from its default or was read as given."""
    lines = {table: [f"[{table}]"] for table in TABLES}
    for setting in OPEN:
        if setting.name != "api_key_file":
            lines[setting.table].append(f"{setting.name} = {SAMPLES[setting.name][0][0]}")
    lines["server"].append(f'api_key = "{KEY}"')
    configuration = from_file(tmp_path, "\n".join(line for part in lines.values() for line in part))
    assert configuration.runtime() == RuntimeSettings(
        core="/srv/one",
        threads=3,
        kv_memory=MemorySize(share=0.4),
        huge_pages=True,
        verify=True,
        aliases=("a/b", "c d"),
        max_tokens=1,
        max_waiting=1,
        strict_tools="relax",
        thinking_token_budget=1,
        temperature=0.25,
        check=True,
        cpu_fallback=False,
    )
    assert configuration.server() == ServerSettings(
        host="::1",
        port=0,
        api_key=KEY,
        max_body_bytes=1024,
        max_bodies_bytes=2048 * MIB,
        max_requests=1,
        max_connections=1,
        frontend_threads=1,
        body_silence_s=0.1,
        body_total_s=0.5,
        keepalive_comment_s=1.0,
        keepalive_s=1.0,
        shutdown_s=1.0,
    )


layers = st.fixed_dictionaries({}, optional={s.name: st.lists(st.integers(0, 1), max_size=3) for s in OPEN})
"""For each setting: none, or the samples that the file, the environment and the options give, in this order."""


@given(layers, st.sampled_from([(0, 1, 2), (2, 0, 1), (1, 2, 0)]))
def test_options_win_over_variables_and_these_over_the_file(
    tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, list[int]], order: tuple[int, ...]
) -> None:
    lines = {table: [f"[{table}]"] for table in TABLES}
    environment: dict[str, str] = {}
    options: dict[str, Any] = {}
    wanted: dict[str, tuple[str, int]] = {}
    for name, samples in chosen.items():
        setting = BY_NAME[name]
        for layer, sample in sorted(zip(order, samples, strict=False)):
            literal, text = SAMPLES[name][sample]
            if layer == 0:
                lines[setting.table].append(f"{name} = {literal}")
            elif layer == 1:
                environment[setting.variable] = text
            elif setting.flag:
                options[name] = setting.kind.parse(text) if isinstance(setting.kind, Switch) else text
            else:
                continue
            wanted[name] = (["file", setting.variable, setting.flag][layer], sample)
    file = tmp_path_factory.getbasetemp() / "layers.toml"
    write(file, "\n".join(line for part in lines.values() for line in part))
    configuration = configure(options, environment, config=str(file))
    for setting in OPEN:
        source, sample = wanted.get(setting.name, ("default", -1))
        assert configuration.values[setting.name].source == source
        if source != "default":
            assert configuration[setting.name] == setting.kind.parse(SAMPLES[setting.name][sample][1])
    again = configure({}, {}, config=str(write(file, configuration.toml())))
    assert {n: v for n, (v, _) in again.values.items()} == {n: v for n, (v, _) in configuration.values.items()}


BAD_TEXTS: dict[str, list[str]] = {
    "threads": ["0", "257", "", "two", "1.5", "0x10", "9" * 5000],
    "kv_memory": ["2\nGiB", "0", "96%", "2 parsecs", "nan", "-1"],
    "max_tokens": ["0", "2147483648"],
    "max_waiting": ["0", "65537"],
    "huge_pages": ["yes please", "2"],
    "host": ["a\nb", "h" * 254, "\x7f", "\udcff"],
    "port": ["-1", "65536", "http"],
    "api_key_file": ["a\0b", "\udcff"],
    "aliases": ["a\tb", "n" * 257, ",".join("a" * 65), "a\u2028b"],
    "strict_tools": ["Refuse", "allow"],
    "thinking_token_budget": ["0", "2147483648", "1.5"],
    "max_body_bytes": ["1023", "1025MiB", "1 PB", "inf"],
    "max_bodies_bytes": ["0", "65GiB"],
    "max_requests": ["0", "65537"],
    "max_connections": ["0", "65537"],
    "frontend_threads": ["0", "65"],
    "body_silence_s": ["0", "nan", "inf", "3601", "-1", "1e400"],
    "body_total_s": ["0", "86401", "1 s"],
    "keepalive_comment_s": ["0", "3601"],
    "keepalive_s": ["0", "86401"],
    "shutdown_s": ["0", "3601"],
}


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name, texts in BAD_TEXTS.items() for text in texts if text]
)
def test_bad_text_is_refused_with_its_place_and_bound(name: str, text: str) -> None:
    setting = BY_NAME[name]
    places = [(setting.variable, {}, {setting.variable: text})]
    if setting.flag and not isinstance(setting.kind, Switch):
        value = text.split(",") if name == "aliases" else text
        places.append((setting.flag, {name: value}, {}))
    for place, options, environment in places:
        with pytest.raises(InputError) as caught:
            configure(options, environment)
        line = str(caught.value)
        assert line.startswith(f"{place}: ") and line.endswith(f"is not {setting.kind.noun} {setting.kind.bound}")
        assert "\n" not in line and len(line) < 300


WRONG_TYPES = [
    "1979-05-27",
    "[[1]]",
    "{a = 1}",
    "[1]",
    "nan",
    "1" + "0" * 70,
    "0x" + "f" * 9000,
    '"\\u0000"',
    "true",
    "-7",
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_values_of_the_wrong_type_are_refused(setting: Setting, tmp_path: Path) -> None:
    for literal in WRONG_TYPES[:-2] + [
        v for v in WRONG_TYPES[-2:] if not (isinstance(setting.kind, Switch) and v == "true")
    ]:
        line = refusal(tmp_path, f"[{setting.table}]\n{setting.name} = {literal}\n")
        assert line.startswith(f"{setting.key}: ") and setting.kind.bound in line
