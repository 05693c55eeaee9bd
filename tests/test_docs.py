"""The documentation and the program agree: every option, variable and error code is described, and nothing else is."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
from msgspec.structs import astuple

from flare.config import ServerSettings
from flare.core.manifest import MAX_EXPLICIT_IDS
from flare.core.oracle import tolerance
from flare.core.sampling import VALID
from flare.http.codings import MAX_MEMBERS, MAX_WINDOW_BYTES
from flare.output import FORMATS
from flare.protocols.fields import INERT, MAX_STOP_BYTES, MAX_STOP_SEQUENCE, MAX_STOP_STRINGS, MAX_TOKEN_STOPS
from flare.protocols.logprob_fields import MAX_PROMPT_VALUES, MAX_VALUES
from flare.protocols.thinking import MAX_VARIABLE_NESTING, MAX_VARIABLES_BYTES
from flare.runtime import MAX_CHOICES, Runtime
from flare.served import GREEDY_BELOW
from flare.settings import SETTINGS, TABLES, Switch
from flare.sources import configure
from flare.text.sandbox import MAX_CHARS, MAX_STEPS

COMMANDS = {
    "flare": ["serve", "chat"],
    "ignition": ["export", "inspect", "validate"],
}
GENERAL = {"--help", "--install-completion", "--show-completion"}
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")


def help_text(program: str, *arguments: str) -> str:
    """What `program ARGUMENTS --help` prints, wide enough that nothing is cut off."""
    result = subprocess.run(
        [sys.executable, "-m", f"{program}.cli", *arguments, "--help"],
        env=os.environ | {"COLUMNS": "240", "TERM": "dumb", "NO_COLOR": "1"},
        cwd=Path(__file__).resolve().parent.parent,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def section(document: Path, heading: str) -> str:
    """The text of one `## heading` section of a Markdown file."""
    match = re.search(rf"^## {re.escape(heading)}$(.*?)(?=^## |\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert match, f"{document.name} has no section `## {heading}`"
    return match[1]


@pytest.mark.parametrize(("program", "command"), [(p, c) for p, commands in COMMANDS.items() for c in commands])
def test_options_of_a_command(repository: Path, program: str, command: str) -> None:
    """The options in the command's help and in its section of docs/cli.md are the same set."""
    offered = set(OPTION.findall(help_text(program, command))) - GENERAL
    table = section(repository / "docs/cli.md", f"{program} {command}")
    first_cells = re.findall(r"^\| ((?:\\\||[^|])*)\|", table, re.MULTILINE)
    documented = {option for cell in first_cells for option in OPTION.findall(cell)}
    assert offered == documented


@pytest.mark.parametrize("program", COMMANDS)
def test_commands(repository: Path, program: str) -> None:
    """Each command in the program's help has a section in docs/cli.md, and the other way round."""
    listed = set(re.findall(r"^[\s│|]*([a-z][a-z-]*)\s{2,}\S", help_text(program), re.MULTILINE))
    documented = set(re.findall(rf"^## {program} ([a-z-]+)$", (repository / "docs/cli.md").read_text(), re.MULTILINE))
    assert documented == set(COMMANDS[program])
    assert documented <= listed, f"{program} --help lists {sorted(listed)}"


def test_options_of_the_commands_that_are_shown(repository: Path) -> None:
    """Every command line in README and documents has only options that its command takes."""
    offered = {(p, c): set(OPTION.findall(help_text(p, c))) for p, commands in COMMANDS.items() for c in commands}
    shown = re.compile(r"(?<![\w-])(flare|ignition) (serve|chat|export|inspect|validate)\b([^`\n]*)")
    found = 0
    for document in [repository / "README.md", *(repository / "docs").glob("*.md"), *repository.glob("*/README.md")]:
        for program, command, rest in shown.findall(document.read_text()):
            options = set(OPTION.findall(rest.partition("#")[0]))
            assert options <= offered.get((program, command), set()), f"{document.name}: {program} {command}{rest}"
            found += bool(options)
    assert found > 5


def test_make_help_names_every_target(repository: Path) -> None:
    targets = re.search(r"^\.PHONY: (.*)$", (repository / "Makefile").read_text(), re.M)
    assert targets is not None
    for arguments in (["help"], []):
        command = ["make", "--no-print-directory", *arguments]
        told = subprocess.run(command, cwd=repository, capture_output=True, text=True).stdout
        assert re.findall(r"^make ([a-z-]+) ", told, re.M) == targets[1].split()


def test_environment_variables(repository: Path) -> None:
    """Every FLARE_ or IGNITION_ variable that the program reads is in the documentation, and no other is.

    docs/clients.md speaks of the clients' variables; the examples of operations.md stand outside of its sections here.
    """
    used = {name for name in strings(repository) if re.fullmatch(r"(FLARE|IGNITION)_[A-Z_]*[A-Z]", name)}
    used |= {setting.variable for setting in SETTINGS} - {""}
    text = (repository / "docs/cli.md").read_text()
    text += section(repository / "docs/operations.md", "Configuration")
    documented = set(re.findall(r"`((?:FLARE|IGNITION)_[A-Z_]*[A-Z])`", text))
    assert used == documented - {"FLARE_SERVICE_HOST"}


def test_settings(repository: Path) -> None:
    """The tables of docs/operations.md are the program's, word for word and in its order."""
    text = section(repository / "docs/operations.md", "Configuration")
    tables = re.split(r"^### \[(\w+)\]$", text, flags=re.M)
    assert tuple(tables[1::2]) == TABLES
    for table, content in zip(TABLES, tables[2::2], strict=True):
        assert rows(content) == [
            [
                *(f"`{name}`" if name else "none" for name in (setting.name, setting.variable, setting.option)),
                *(setting.default_text, f"{setting.kind.noun} {setting.kind.bound}", setting.help),
            ]
            for setting in SETTINGS
            if setting.table == table
        ]


def test_the_configuration_that_is_shown_is_one(repository: Path, tmp_path: Path) -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (repository / "docs/operations.md").read_text(), re.S)
    file = tmp_path / "flare.toml"
    file.write_text(shown)
    configuration = configure({}, {}, config=str(file))
    assert len([given for given in configuration.values.values() if given.source == "file"]) == shown.count(" = ")


def test_options_of_settings(repository: Path) -> None:
    """The options of `flare serve` are documented with the metavariable and, where it is a plain value, the default."""
    documented = {cells[0]: cells[1] for cells in rows(section(repository / "docs/cli.md", "flare serve"))}
    for setting in SETTINGS:
        if setting.flag.startswith("--") and not isinstance(setting.kind, Switch):
            assert documented[f"`{setting.option}`"].strip("`") == setting.default_text


def test_error_codes(repository: Path) -> None:
    """Every `code` of a refused request is in the table of docs/api.md, and no other is."""
    used = {code for path in (repository / "flare").rglob("*.py") for code in error_codes(ast.parse(path.read_text()))}
    documented = set(re.findall(r"^\| `([a-z_]+)` \|", section(repository / "docs/api.md", "Error codes"), re.M))
    assert used == documented


def rows(table: str) -> list[list[str]]:
    """The cells of every row of the Markdown tables in a text, without their headings."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(lines) if set(line) <= set("|-: ")}
    kept = [line for index, line in enumerate(lines) if index not in heads and index - 1 not in heads]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


def test_fields_without_an_effect(repository: Path) -> None:
    """The table of docs/api.md and the program's, word for word."""
    documented = rows(section(repository / "docs/api.md", "Fields without an effect"))
    assert documented == [[f"`{name}`", reason] for name, reason in INERT.items()]


def test_limits(repository: Path) -> None:
    """Every number in the tables of limits is the program's, in the order of the tables."""
    text = section(repository / "docs/api.md", "Limits")
    settings = ServerSettings()
    max_waiting = signature(Runtime).parameters["max_waiting"].default
    limits = [
        *(settings.max_body_bytes, settings.max_bodies_bytes, MAX_MEMBERS, MAX_WINDOW_BYTES),
        *(settings.max_connections, settings.keepalive_s),
        *(settings.body_silence_s, settings.body_total_s, settings.max_requests, MAX_CHOICES, max_waiting),
        *(MAX_STOP_STRINGS, MAX_STOP_BYTES, MAX_TOKEN_STOPS, MAX_STOP_SEQUENCE),
        *(MAX_VARIABLES_BYTES, MAX_VARIABLE_NESTING),
        *(settings.max_body_bytes, MAX_EXPLICIT_IDS, MAX_PROMPT_VALUES, MAX_VALUES, MAX_CHARS, MAX_STEPS),
        *(settings.keepalive_comment_s, settings.shutdown_s),
    ]
    cells = rows(text)
    assert [float(row[1].split()[0]) for row in cells[: len(limits)]] == limits
    bounds = {name.strip("`"): (float(low), float(high)) for name, low, high in cells[len(limits) :]}
    assert bounds == VALID
    assert f"under {GREEDY_BELOW} is greedy" in text


def strings(repository: Path) -> set[str]:
    """All string constants in the shipped packages."""
    return {
        node.value
        for package in ("flare", "ignition", "recipes")
        for path in (repository / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def error_codes(tree: ast.AST) -> set[str]:
    """Constants given as `code=` to a RequestError or one of the functions that make one."""
    return {
        keyword.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "code" and isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str)
    }


def test_formats_of_what_models_write(repository: Path) -> None:
    row = next(
        line for line in (repository / "docs/core-format.md").read_text().splitlines() if "`output.tools`" in line
    )
    assert set(re.findall(r"`([a-z0-9_]+)`", row.partition("One of")[2])) == FORMATS


def test_links_between_documents_lead_somewhere(repository: Path) -> None:
    for document in [repository / "README.md", *(repository / "docs").glob("*.md"), repository / "cores/README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}, which does not exist"


def test_the_oracle_s_tolerances(repository: Path) -> None:
    """The table of the core's format has the program's."""
    text = section(repository / "docs/core-format.md", "Oracle")
    found = {cells[0]: cells[1:] for cells in rows(text) if cells[0].split(",")[0] in ("f32", "f16", "q8")}
    for formats, numbers in found.items():
        for name in formats.split(", "):
            assert [float(number) for number in numbers] == list(astuple(tolerance([name])))
    assert len(found) == 3
