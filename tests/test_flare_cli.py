"""The command `flare`: quick to answer, thin, and one line when it cannot."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flare.cli import configured, make_parser
from flare.config import MIB, MemorySize, RuntimeSettings, parse_memory_size, read_api_key, usable_cpus
from flare.errors import InputError, SettingError
from flare.http import startup
from flare.report import Laps, process_age, start_report
from tests.support.forged_cores import forge_manifest

THIN = """
import sys
import flare.cli, flare.http.startup, flare.chat_terminal
flare.http.startup.import_http_library()
heavy = {"torch", "triton", "transformers", "ignition", "recipes", "numpy", "pydantic", "typer", "rich"}
print(sorted(heavy & set(sys.modules)))
"""


def flare(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flare.cli", *arguments], capture_output=True, text=True, **options)


def failed(result: subprocess.CompletedProcess[str], code: int) -> str:
    assert result.returncode == code, result
    assert result.stdout == "" and result.stderr.startswith("flare: ")
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    return result.stderr


def test_help_names_the_commands_and_does_little() -> None:
    result = flare("--help")
    assert result.returncode == 0 and {"serve", "chat"} <= set(result.stdout.split())
    slow = {"asyncio", "aiohttp", "msgspec", "jinja2", "tokenizers", "numpy", "ctypes", "ssl"}
    found = subprocess.run(
        [sys.executable, "-c", "import flare.cli, sys; print(*sys.modules)"], capture_output=True, text=True, check=True
    )
    assert not slow & set(found.stdout.split())


def test_version() -> None:
    result = flare("--version")
    assert (result.returncode, result.stdout) == (0, "flare 0.1.0\n")


def test_serving_imports_nothing_heavy() -> None:
    result = subprocess.run([sys.executable, "-c", THIN], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "COMMAND; see `flare --help`"),
        (("bogus",), "flare: 'bogus' is no command; there are serve and chat; see `flare --help`"),
        (("serv", "x"), "flare: 'serv' is no command; is serve meant?; there are serve and chat; see `flare --help`"),
        (("export", "smollm2"), "export is a command of the exporter: `ignition export`; see `flare --help`"),
        (("--port", "1", "serve"), "'--port' is no option of `flare`; those of a command stand behind it"),
        (("serve", "x", "--max-token", "5"), "'--max-token' is no option of `flare serve`; is --max-tokens meant?"),
        (("serve", "x", "--max-token=5"), "is --max-tokens meant?; see `flare serve --help`"),
        (("serve", "x", "--max"), "'--max' is no option of `flare serve`"),
        (("serve", "x", "y"), "'y' is one argument too many; what has spaces stands in quotes; see `flare serve"),
        (("serve", "x", "--port"), "argument --port: expected one argument; see `flare serve --help`"),
        (("chat", "x", "what", "is", "it"), "'is' is one argument too many; what has spaces stands in quotes"),
        (("chat", "x", "hello", "--temperature", "hot"), "--temperature: 'hot' is not a number from -10000 to 10000"),
        (("chat", "x", "hello", "--temperature", "nan"), "--temperature: 'nan' is not a number"),
        (("chat", "x", "hello", "--seed", "-1"), "--seed: '-1' is not a whole number from 0 to 9223372036854775807"),
        (("serve",), "CORE"),
        (("serve", "x", "--port", "65536"), "--port: '65536' is not a whole number from 0 to 65535"),
        (("serve", "x", "--port", "http"), "--port"),
        (("serve", "x", "--threads", "0"), "--threads"),
        (("serve", "x", "--max-tokens", "0"), "--max-tokens"),
        (("serve", "x", "--temperature", "-1"), "--temperature: '-1' is not a number from 0 to 10000"),
        (("serve", "x", "--temperature", "nan"), "--temperature: 'nan' is not a number from 0 to 10000"),
        (("serve", "x", "--kv-memory", "2 parsecs"), "2 parsecs"),
        (("serve", "x", "--api-key-file", "no/such/file"), "no/such/file"),
        (("serve", "x", "--config", "no/such/file"), "no/such/file: cannot be read"),
        (("serve", "x", "--host", "no.such.host.invalid"), "--host: no.such.host.invalid: not a name or an address"),
        (("serve", "x", "--host", "a" * 64), "aaa: not a name or an address; choose another"),
        (("serve", "x", "--host", "192.0.2.1"), "--host: 192.0.2.1: cannot listen there (Cannot assign requested addr"),
        (("serve", ""), "CORE: '' is not a path"),
        (("serve", "no/such/core", "--port", "0"), "flare: CORE: no/such/core: no such core directory"),
        (("chat", "no/such/core", "hello"), "flare: CORE: no/such/core: no such core directory"),
        (("chat", "x", "--nope"), "'--nope' is no option of `flare chat`"),
        (("chat", "x", "--port", "1"), "'--port' is no option of `flare chat`"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], says: str) -> None:
    assert says in failed(flare(*arguments, stdin=subprocess.DEVNULL), 2)


def test_a_core_that_is_not_there_is_named_with_its_place(tmp_path: Path) -> None:
    line = failed(flare("serve", "--port", "0", env=os.environ | {"FLARE_CORE": "no/core"}), 2)
    assert line.startswith("flare: FLARE_CORE: no/core: no such core directory")
    file = tmp_path / "flare.toml"
    file.write_text('[runtime]\ncore = "no/core"')
    line = failed(flare("chat", "--config", str(file), input="hello"), 2)
    assert line.startswith(f"flare: {file}: [runtime] core: {tmp_path}/no/core: no such core directory")


def test_what_a_setting_asks_for_and_cannot_have_is_named_with_its_place(tiny_core: Path, tmp_path: Path) -> None:
    little = os.environ | {"FLARE_CORE": str(tiny_core), "FLARE_KV_MEMORY": "1KB"}
    for command in (["serve", "--port", "0"], ["chat", str(tiny_core), "hello"]):
        line = failed(flare(*command, env=little, stdin=subprocess.DEVNULL), 2)
        assert line.startswith("flare: FLARE_KV_MEMORY: 0.0 MiB: they hold 0 pages of "), line
    file = tmp_path / "flare.toml"
    with startup.bind("127.0.0.1", 0) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        file.write_text(f"[server]\nport = {port}")
        for place, given in ((f"{file}: [server] port", ["--config", str(file)]), ("--port", ["--port", str(port)])):
            line = failed(flare("serve", "x", *given), 2)
            text = f"{port}: cannot listen on it at 127.0.0.1 (Address already in use); choose another"
            assert line == f"flare: {place}: {text}\n"


def test_a_prompt_in_the_place_of_the_core_is_told_where_it_belongs() -> None:
    line = failed(flare("chat", "What is 2 + 2?", input="hello"), 2)
    assert line.startswith("flare: CORE: What is 2 + 2?: no such core directory")
    assert line.endswith("; a prompt is the second argument: `flare chat CORE PROMPT`\n")


def test_options_may_stand_between_arguments() -> None:
    orders = (
        ["c", "--threads", "3", "a prompt", "--seed", "5"],
        ["--threads", "3", "--seed", "5", "c", "a prompt"],
        ["c", "a prompt", "--seed=5", "--threads", "3"],
        ["--threads", "3", "--seed", "5", "--", "c", "a prompt"],
    )
    for order in orders:
        options = make_parser().read(["chat", *order])
        assert (options.core, options.prompt, options.threads, options.asked_seed) == ("c", "a prompt", "3", "5"), order
    options = make_parser().read(["chat", "c", "--", "--what does this do?"])
    assert (options.core, options.prompt) == ("c", "--what does this do?")
    assert make_parser().read(["serve", "--verify", "c", "--port", "1"]).core == "c"


def test_a_bad_core_is_one_line(tmp_path: Path) -> None:
    assert "core.json" in failed(flare("serve", str(tmp_path), "--port", "0"), 1)


def test_a_taken_port_is_noticed_before_the_core_is_touched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = failed(flare("serve", "no/such/core", "--port", str(port)), 2)
    assert line.startswith(f"flare: --port: {port}: cannot listen on it at 127.0.0.1 (Address already in use)")


def test_of_two_servers_that_start_together_one_does_not_load() -> None:
    """Neither of them listens yet."""
    sock = startup.bind("127.0.0.1", 0)
    with sock:
        startup.reserve(sock, True)
        port = sock.getsockname()[1]
        with pytest.raises(InputError, match=f"^{port}: cannot listen on it at 127.0.0.1 .*in use"):
            startup.bind("127.0.0.1", port)


def test_a_server_starts_beside_the_lingering_connections_of_its_predecessor() -> None:
    with startup.bind("127.0.0.1", 0) as sock:
        startup.reserve(sock, True)
        startup.reserve(sock, False)
        sock.listen()
        address = sock.getsockname()
        with socket.create_connection(address) as client:
            sock.accept()[0].close()  # the server's side closes first and lingers
            assert client.recv(1) == b""
    with startup.bind(*address) as successor:
        startup.reserve(successor, True)


def test_a_port_that_takes_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(startup.socket, "socket", type("Socket", (socket.socket,), {"bind": refuse}))
    with pytest.raises(
        SettingError, match=re.escape("80: cannot listen on it at 127.0.0.1 (Permission denied); choose another")
    ):
        startup.bind("127.0.0.1", 80)


@pytest.mark.parametrize(
    ("address", "open_to_others"),
    [
        ("127.0.0.1", False),
        ("127.8.8.8", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
        ("0.0.0.0", True),
        ("::", True),
        ("10.0.0.1", True),
        ("::ffff:10.0.0.1", True),
    ],
)
def test_who_may_reach_an_address(address: str, open_to_others: bool) -> None:
    assert startup.open_to_others(address) is open_to_others


@pytest.mark.parametrize(
    ("host", "outside", "shown"),
    [
        ("127.0.0.1", "10.0.0.7", ["http://127.0.0.1:8000/v1"]),
        ("10.0.0.1", "10.0.0.7", ["http://10.0.0.1:8000/v1"]),
        ("::1", None, ["http://[::1]:8000/v1"]),
        ("fd00::5", "fd00::7", ["http://[fd00::5]:8000/v1"]),
        ("0.0.0.0", "10.0.0.7", ["http://127.0.0.1:8000/v1", "http://10.0.0.7:8000/v1"]),
        ("0.0.0.0", None, ["http://127.0.0.1:8000/v1"]),
        ("::", "fd00::7", ["http://[::1]:8000/v1", "http://[fd00::7]:8000/v1"]),
    ],
)
def test_the_addresses_that_are_shown_can_be_used(
    monkeypatch: pytest.MonkeyPatch, host: str, outside: str | None, shown: list[str]
) -> None:
    monkeypatch.setattr(startup, "outside_address", lambda wildcard: outside)
    assert startup.addresses(host, 8000) == shown


def test_the_address_that_others_see_is_one_of_this_machine() -> None:
    """A socket can be bound to it; without a network there is none."""
    for wildcard, family in (("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)):
        address = startup.outside_address(wildcard)
        if address is not None:
            with socket.socket(family) as sock:
                sock.bind((address, 0))


def test_an_empty_prompt_is_refused() -> None:
    assert "prompt is empty" in failed(flare("chat", "x", input=" \n"), 2)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", MemorySize(bytes=4096)),
        ("2GiB", MemorySize(bytes=2 << 30)),
        ("1.5 gib", MemorySize(bytes=3 << 29)),
        ("800MB", MemorySize(bytes=800_000_000)),
        ("512KiB", MemorySize(bytes=512 << 10)),
        ("40%", MemorySize(share=0.4)),
        (" 95 %", MemorySize(share=0.95)),
    ],
)
def test_sizes(text: str, size: MemorySize) -> None:
    assert parse_memory_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "0", "-1GiB", "1e400", "nan", "inf", "96%", "0%", "1GiB%", "3 XB", "999999TiB"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError):
        parse_memory_size(text)


def runtime_of(*arguments: str) -> RuntimeSettings:
    return configured(make_parser().read(list(arguments))).runtime()


def test_options_become_settings() -> None:
    options = make_parser().read(
        ["serve", "c", "--threads", "3", "--kv-memory", "64MiB", "--huge-pages", "--alias", "a", "--alias", ""]
    )
    settings = configured(options).runtime()
    assert (settings.core, settings.threads, settings.huge_pages, settings.aliases) == ("c", 3, True, ("a",))
    assert settings.kv_memory == MemorySize(bytes=64 * MIB) and settings.max_tokens is None
    server = configured(options).server()
    assert (server.host, server.port) == ("127.0.0.1", 8000)
    assert runtime_of("chat", "c").threads == usable_cpus()


def test_key_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    for content, key in ((b"", ""), (b" \n", ""), (b"sk-1\n", "sk-1")):
        file.write_bytes(content)
        assert read_api_key(file, "--api-key-file") == key
    for content in (b"two words", b"\xff", b"k" * 5000, b"a\nb"):
        file.write_bytes(content)
        with pytest.raises(InputError):
            read_api_key(file, "--api-key-file")


def test_the_start_report_adds_up() -> None:
    """Printed milliseconds add up to the printed total, whatever the roundings."""
    main = Laps(laps=[("python", 0.0214), ("imports", 0.1804), ("core", 0.0124), ("listen", 0.0044)])
    beside = Laps(laps=[("tokenizer", 0.048), ("kernels", 0.003)])
    first, second = start_report(main, beside)
    parts = [int(number) for number in re.findall(r"(\d+) ms", first)]
    assert sum(parts[:-1]) == parts[-1] == round(main.total * 1e3)
    assert second == "loaded beside the imports: tokenizer 48 ms, kernels 3 ms"


def test_laps_leave_no_gap() -> None:
    before = time.monotonic()
    laps = Laps.since_process_start()
    for name in ("a", "b"):
        laps.mark(name)
    assert [name for name, _ in laps.laps] == ["python", "a", "b"]
    assert sum(seconds for _, seconds in laps.laps[1:]) == pytest.approx(laps.last - before, abs=0.05)
    assert laps.laps[0][1] == pytest.approx(process_age(), abs=0.05)


def test_a_temperature_outside_of_the_author_s_range_names_where_it_was_given(tiny_core: Path, tmp_path: Path) -> None:
    core = Path(shutil.copytree(tiny_core, tmp_path / "core"))
    forge_manifest(core, lambda manifest: manifest["sampling"].update(ranges={"temperature": [0.7, 1.0]}))
    (tmp_path / "flare.toml").write_text("[server]\ntemperature = 0.2\n")
    serve = ("serve", str(core), "--port", "0", "--kv-memory", "4MiB")
    says = ": the author's range of this core is 0.7 to 1; choose a value in it, or export the core with --sampling-ranges open"
    for options, place in (
        (("--temperature", "1.5"), "--temperature: 1.5"),
        (("--config", str(tmp_path / "flare.toml")), f"{tmp_path}/flare.toml: [server] temperature: 0.2"),
    ):
        assert failed(flare(*serve, *options, stdin=subprocess.DEVNULL), 2) == f"flare: {place}{says}\n"


SERVE = """
import sys
from flare.config import RuntimeSettings, ServerSettings
from flare.http import startup
from flare import runtime
from flare.report import Laps
from tests.support.live_server import LiveServer, reply

made = LiveServer(script=lambda prompt, choice: [97] * 400)
made.sock.close()
runtime.Runtime.load = classmethod(lambda cls, settings, laps: (laps.mark("scripted"), made.runtime)[1])
settings = ServerSettings(port=0, host=sys.argv[1], api_key=sys.argv[2])
startup.serve(RuntimeSettings(core="c", threads=1), settings, Laps.since_process_start())
print("closed", made.replay._dead)
"""


def serving(repository: Path, host: str, key: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SERVE, host, key]
    return subprocess.Popen(command, cwd=repository, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_server_in_order(repository: Path, number: int) -> None:
    process = serving(repository, "127.0.0.1")
    assert process.stderr is not None
    report = [process.stderr.readline() for _ in range(3)]
    parts = [int(n) for n in re.findall(r"(\d+) ms", report[0])]
    assert sum(parts[:-1]) == parts[-1]
    assert re.findall(r"(\w+) \d+ ms,", report[0]) == ["python", "options", "bind", "imports", "core"]
    assert report[1].startswith("loaded beside the imports: scripted ")
    match = re.fullmatch(r"serving org/tiny on http://127\.0\.0\.1:(\d+)/v1\n", report[2])
    assert match, report
    with socket.create_connection(("127.0.0.1", int(match[1])), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        os.kill(process.pid, number)
        out, errors = process.communicate(timeout=20)
    assert process.returncode == 0 and out == "closed the replay is closed\n" and errors == ""


@pytest.mark.parametrize("key", ["", "sk-1"])
def test_a_server_that_others_may_use_without_a_key_says_so(repository: Path, key: str) -> None:
    process = serving(repository, "0.0.0.0", key)
    assert process.stderr is not None
    first = process.stderr.readline()
    while not (line := process.stderr.readline()).startswith("serving "):
        assert line
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/v1", line)[1])
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    process.terminate()
    process.communicate(timeout=20)
    assert (key == "") == ("warning" in first and "0.0.0.0" in first and "--api-key-file" in first)


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        ("flare", {"aiohttp", "numpy", "tokenizers", "jinja2", "msgspec", "asyncio"}),
        ("ignition", {"numpy", "torch"}),
    ],
)
def test_help_imports_nothing_heavy(repository: Path, program: str, heavy: set[str]) -> None:
    """What `--help` of each program has imported when it exits; answering within 150 ms follows from it."""
    code = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr))\n"
        f"sys.argv = [{program!r}, '--help']\n"
        f"runpy.run_module('{program}.cli', run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0 and "--help" in result.stdout
    assert not heavy & set(result.stderr.split())


def test_huge_pages_are_off_unless_asked_for() -> None:
    for arguments, wanted in (((), False), (("--huge-pages",), True), (("--no-huge-pages",), False)):
        assert runtime_of("chat", "c", *arguments).huge_pages is wanted
    help_text = " ".join(flare("serve", "--help").stdout.split())
    assert "copy the weights into huge pages at load (default: false)" in help_text
