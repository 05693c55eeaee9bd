"""Configuration files, keys and variables: what is refused, what is warned of, what is printed and what never is."""

from __future__ import annotations

import os
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flare.cli import main
from flare.config import MIB, MemorySize, RuntimeSettings, ServerSettings, usable_cpus
from flare.errors import InputError
from flare.sources import configure
from tests.support.configuration import from_file, refusal, write

KEY = "sk-hush-Zx81"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 1", "'port' is no table of settings; it belongs below [server]"),
        ("[runtime]\nport = 1", "[runtime] has no setting 'port'; it belongs below [server]"),
        ("[server]\nmax_token = 1", "[server] has no setting 'max_token'; is max_tokens meant?"),
        ("[server]\nfoo = 1", "[server] has no setting 'foo'; there are the tables"),
        ("[sever]\nport = 1", "'sever' is no table of settings; is server meant?"),
        ("server = 1", "server is a table"),
        ("[[server]]\nport = 1", "server is a table"),
        ("[server.limits]\nport = 1", "[server] has no setting 'limits'"),
        ("[server]\nport = 1\nport = 2\n# more", "line 3, column"),
        ("[server]\nport = 1\nport = 2", "not TOML at its end, or a key given twice"),
        ("[server]\nport = \n# more", "line 2, column"),
        ("[server", "not TOML"),
        ("[server]\na = " + "[" * 100_000, "nested too deep"),
        ("[server]\nport = " + "9" * 5000, "a number is too long"),
        (f'[server]\napi_key = "{KEY}"\napi_key_file = "k"', "both api_key and api_key_file"),
        ("#" * (MIB + 1), f"longer than {MIB} bytes"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


@given(st.binary(max_size=60) | st.text(alphabet="[]{}=\"'.,#\n server_port1", max_size=60).map(str.encode))
def test_any_file_is_read_or_refused_in_one_line(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    for content in (data, b"[server]\n" + data):
        file.write_bytes(content)
        try:
            configure({}, {}, config=str(file)).server()
        except InputError as error:
            assert str(error).startswith(f"{file}: ") and "\n" not in str(error)


def test_files_that_cannot_be_had(tmp_path: Path) -> None:
    for name in ("missing.toml", ".", "a\0b", "x" * 5000):
        for options in ({"config": str(tmp_path / name)}, {"environment": {"FLARE_CONFIG": str(tmp_path / name)}}):
            with pytest.raises(InputError):
                configure({}, **({"environment": {}} | options))  # type: ignore[arg-type]
    assert configure({}, {}, config=str(write(tmp_path / "flare.toml", "", 0o664))).warnings == []
    write(tmp_path / "flare.toml", "", 0o666)
    with pytest.raises(InputError, match="every user of this machine may change it"):
        configure({}, {}, config=str(tmp_path / "flare.toml"))


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    one, two = (write(tmp_path / f"{port}.toml", f"[server]\nport = {port}") for port in (1, 2))
    assert configure({}, {"FLARE_CONFIG": str(one)})["port"] == 1
    assert configure({}, {"FLARE_CONFIG": str(one)}, config=str(two))["port"] == 2
    assert configure({}, {"FLARE_CONFIG": ""})["port"] == 8000


def test_paths_in_a_file_begin_at_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "etc").mkdir()
    write(tmp_path / "etc/flare.toml", '[runtime]\ncore = "../c"\n[server]\napi_key_file = "key"')
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "etc/key", KEY)
    configuration = configure({}, {}, config="etc/flare.toml")
    assert configuration.runtime().core == "etc/../c" and configuration.server().api_key == KEY
    assert tomllib.loads(configuration.toml())["runtime"]["core"] == f"{tmp_path}/c"
    assert configure({"core": "c"}, {}, config="etc/flare.toml").runtime().core == "c"


@pytest.mark.parametrize(
    ("text", "environment", "line"),
    [
        ("", {"FLARE_MAX_BODY_BYTES": "512MiB"}, "max_bodies_bytes: 268435456 is less than 536870912 of {variable}: "),
        ("", {"FLARE_MAX_BODIES_BYTES": "16MiB"}, "{variables}: 16777216 is less than 33554432 of max_body_bytes: "),
        (
            "max_bodies_bytes = 2048",
            {},
            "{file}: [server] max_bodies_bytes: 2048 is less than 33554432 of max_body_bytes: ",
        ),
        (
            "max_body_bytes = 4096",
            {"FLARE_MAX_BODIES_BYTES": "2048"},
            "{variables}: 2048 is less than 4096 of {file}: [server] max_body_bytes: ",
        ),
    ],
)
def test_bounds_that_contradict_each_other_are_refused_with_their_places(
    tmp_path: Path, text: str, environment: dict[str, str], line: str
) -> None:
    file = write(tmp_path / "flare.toml", f"[server]\n{text}")
    with pytest.raises(InputError) as caught:
        configure({}, environment, config=str(file)).server()
    places = {"file": file, "variable": "FLARE_MAX_BODY_BYTES", "variables": "FLARE_MAX_BODIES_BYTES"}
    end = "no largest body would ever be read; raise the one or lower the other"
    assert str(caught.value) == line.format(**places) + end


def test_keys(tmp_path: Path) -> None:
    """A key's file goes before a key in the configuration, wherever either is named; an empty one asks for none."""
    write(tmp_path / "flare.toml", f'[server]\napi_key = "{KEY}"')
    file, empty = write(tmp_path / "key", "sk-other\n"), write(tmp_path / "empty", "\n")
    config = str(tmp_path / "flare.toml")
    assert configure({}, {}, config=config).server().api_key == KEY
    assert configure({"api_key_file": str(file)}, {}, config=config).server().api_key == "sk-other"
    assert configure({}, {"FLARE_API_KEY_FILE": str(file)}, config=config).server().api_key == "sk-other"
    assert configure({"api_key_file": str(empty)}, {}, config=config).server().api_key == ""
    assert from_file(tmp_path, '[server]\napi_key = ""').server().api_key == ""
    with pytest.raises(InputError, match="missing: cannot be read"):
        configure({"api_key_file": str(tmp_path / "missing")}, {}, config=config).server()


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    for mode, warned in ((0o600, 0), (0o640, 0), (0o644, 1)):
        config = write(tmp_path / "flare.toml", f'[server]\napi_key = "{KEY}"', mode)
        file = write(tmp_path / "key", KEY, mode)
        for configuration in (configure({}, {}, config=str(config)), configure({"api_key_file": str(file)}, {})):
            lines = configuration.key_warnings(configuration.server())
            assert [line.endswith("chmod o-r it") for line in lines] == [True] * warned
            assert configuration.warnings == []
    config = write(tmp_path / "flare.toml", "[server]\nport = 1", 0o644)
    configuration = configure({}, {}, config=str(config))
    assert configuration.key_warnings(configuration.server()) == []


def test_a_key_that_others_may_change_is_refused(tmp_path: Path) -> None:
    """Whoever writes it chooses the key, or asks for none."""
    file = write(tmp_path / "key", KEY, 0o622)
    config = write(tmp_path / "flare.toml", f'[server]\napi_key_file = "{file}"')
    for configuration, place in (
        (configure({"api_key_file": str(file)}, {}), "--api-key-file"),
        (configure({}, {"FLARE_API_KEY_FILE": str(file)}), "FLARE_API_KEY_FILE"),
        (configure({}, {}, config=str(config)), f"{config}: [server] api_key_file"),
    ):
        with pytest.raises(InputError) as caught:
            configuration.server()
        assert str(caught.value) == f"{place}: {file}: every user of this machine may change it; chmod o-w it"
    # Everyone may write to it, and nobody changes it.
    assert configure({"api_key_file": os.devnull}, {}).server().api_key == ""


def test_a_key_is_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in what is printed, nor in an error about its file, nor in the settings' own representation."""
    good = f'[server]\napi_key = "{KEY}"\n'
    bad = [
        good + rest for rest in ("port = x", "port = 0.5", "nope = 1", 'api_key_file = "x"', "[server]", "api_key = 1")
    ]
    bad += [
        f"[server]\napi_key = {value}" for value in (f'"{KEY} {KEY}"', f'["{KEY}"]', f"{KEY}", f'"{KEY}', f'"{KEY}é"')
    ]
    for text in bad:
        assert KEY not in refusal(tmp_path, text)
    configuration = from_file(tmp_path, good)
    assert KEY not in repr(configuration.server()) and KEY not in configuration.toml()
    assert (
        '# api_key = "***"  # file' in configuration.toml()
        and "api_key" not in tomllib.loads(configuration.toml())["server"]
    )
    with pytest.raises(InputError, match="^FLARE_API_KEY: .*FLARE_API_KEY_FILE") as caught:
        configure({}, {"FLARE_API_KEY": KEY})
    assert KEY not in str(caught.value)
    key_file = write(tmp_path / "key", f"{KEY} {KEY}")
    with pytest.raises(InputError) as caught:
        configure({"api_key_file": str(key_file)}, {}).server()
    assert KEY not in str(caught.value)
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(tmp_path / "flare.toml"), "--print-config"])
    assert KEY not in "".join(capsys.readouterr())


def test_a_key_in_quotes_is_no_key_of_a_printed_configuration(tmp_path: Path) -> None:
    """What is printed can be a configuration again, and does not then ask for three asterisks."""
    printed = from_file(tmp_path, f'[server]\napi_key = "{KEY}"').toml()
    again = from_file(tmp_path, printed)
    assert again.server() == replace(from_file(tmp_path, printed).server(), api_key="")


def test_variables_that_are_no_settings(tmp_path: Path) -> None:
    def warnings(**environment: str) -> list[str]:
        return configure({}, environment).warnings

    assert warnings(FLARE_MAX_TOKEN="3") == [
        "the variable FLARE_MAX_TOKEN is no setting and has no effect; is FLARE_MAX_TOKENS meant?"
    ]
    assert warnings(FLARE_KEY="x", flare_port="x", XFLARE_PORT="x") == [
        "the variable FLARE_KEY is no setting and has no effect"
    ]
    assert len(warnings(**{"FLARE_A\nB": "x"})) == 1 and "\n" not in warnings(**{"FLARE_A\nB": "x"})[0]
    assert warnings(FLARE_PORT="", FLARE_CORE="", FLARE_NOPE="") == []


def test_variables_of_others(tmp_path: Path) -> None:
    """What Kubernetes sets in every container beside a service called `flare` or `flare-serve`, and test suites' own."""
    environment = {
        "FLARE_SERVICE_HOST": "10.3.0.7",
        "FLARE_SERVICE_PORT": "8000",
        "FLARE_SERVICE_PORT_HTTP": "8000",
        "FLARE_PORT": "tcp://10.3.0.7:8000",
        "FLARE_PORT_8000_TCP": "tcp://10.3.0.7:8000",
        "FLARE_PORT_8000_TCP_PROTO": "tcp",
        "FLARE_PORT_8000_TCP_PORT": "8000",
        "FLARE_PORT_8000_TCP_ADDR": "10.3.0.7",
        "FLARE_SERVE_SERVICE_HOST": "10.3.0.8",
        "FLARE_SERVE_PORT": "tcp://10.3.0.8:80",
        "FLARE_API_TEST_URL": "http://127.0.0.1:8000",
        "FLARE_RUN_CLIENT_TESTS": "1",
    }
    configuration = configure({}, environment)
    assert configuration.warnings == [] and configuration["port"] == 8000


def test_what_is_printed_is_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("FLARE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLARE_MAX_BODY_BYTES", "1MiB")
    write(tmp_path / "flare.toml", "[runtime]\nmax_tokens = 7")
    arguments = ["serve", r'a "b" \c', "--alias", r'"\"', "--kv-memory", "12.5%", "--port", "1", "--no-verify"]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--config", str(tmp_path / "flare.toml"), "--print-config"])
    printed = capsys.readouterr()
    assert ended.value.code == 0 and printed.err == ""
    assert "port = 1  # --port\n" in printed.out and "max_tokens = 7  # file\n" in printed.out
    assert (
        "max_body_bytes = 1048576  # FLARE_MAX_BODY_BYTES\n" in printed.out
        and "verify = false  # --no-verify" not in printed.out
    )
    monkeypatch.delenv("FLARE_MAX_BODY_BYTES")
    again = from_file(tmp_path, printed.out)
    assert again.runtime() == RuntimeSettings(
        core=os.path.abspath(r'a "b" \c'),
        threads=usable_cpus(),
        kv_memory=MemorySize(share=0.125),
        max_tokens=7,
        aliases=(r'"\"',),
    )
    assert again.server() == ServerSettings(port=1, max_body_bytes=MIB)


def test_strings_are_written_as_toml_reads_them() -> None:
    values = {"aliases": ['a"b', "\\", "é", "\U0001f600", "#", "'"], "host": "h#"}
    configuration = configure({"aliases": values["aliases"], "host": values["host"]}, {})
    server = tomllib.loads(configuration.toml())["server"]
    assert {name: server[name] for name in values} == values
