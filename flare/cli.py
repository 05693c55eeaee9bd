"""The command `flare`: reads the options, imports what the subcommand needs, and ends with one line if it cannot.

The options are read with argparse: a richer library costs more start-up time than loading a core does.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from flare import __version__
from flare.errors import FlareError, InputError
from flare.report import Laps
from flare.settings import SETTINGS, Names, Setting, Switch
from flare.sources import Configuration, configure

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def add_option(parser: Parser, setting: Setting) -> None:
    """Adds a setting's option. Its text is read later, with all other sources; None stands for an option not given."""
    text = f"{setting.help} (default: {setting.default_text})".replace("%", "%%").replace("`", "")
    options: dict[str, Any] = {"dest": setting.name, "help": text, "default": None}
    metavar = setting.option.partition(" ")[2]
    if isinstance(setting.kind, Switch):
        options |= {"action": argparse.BooleanOptionalAction}
    elif isinstance(setting.kind, Names):
        options |= {"action": "append", "metavar": metavar, "help": f"{text}; may be repeated"}
    else:
        options |= {"metavar": metavar}
    parser.add_argument(setting.flag, **options)


def make_parser() -> Parser:
    """Returns the parser of the whole command line."""
    parser = Parser(prog="flare", description="Serve an exported core: loads and replays, compiles nothing.")
    parser.add_argument("--version", action="version", version=f"flare {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    loading = Parser(add_help=False)
    loading.add_argument("core", metavar="CORE", nargs="?", help="directory of an exported core (default: the file's)")
    loading.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (default: the variable FLARE_CONFIG)"
    )
    for setting in SETTINGS:
        if setting.table == "runtime" and setting.flag.startswith("--"):
            add_option(loading, setting)

    serve = commands.add_parser("serve", parents=[loading], help="serve a core over HTTP with the OpenAI APIs")
    for setting in SETTINGS:
        if setting.table == "server" and setting.flag:
            add_option(serve, setting)
    serve.add_argument(
        "--print-config", action="store_true", help="print the settings in effect with their sources, and leave"
    )
    serve.set_defaults(command=run_serve)

    chat = commands.add_parser("chat", parents=[loading], help="talk to a core in the terminal")
    chat.add_argument("prompt", metavar="PROMPT", nargs="?", help="ask this and leave (default: a conversation)")
    chat.set_defaults(command=run_chat)
    return parser


def configured(options: argparse.Namespace) -> Configuration:
    """Returns the settings of all sources. Raises InputError."""
    given = {setting.name: value for setting in SETTINGS if (value := getattr(options, setting.name, None)) is not None}
    return configure(given, config=options.config)


def warn(configuration: Configuration) -> None:
    for line in configuration.warnings:
        print(f"flare: warning: {' '.join(line.split())}", file=sys.stderr)


def run_serve(options: argparse.Namespace) -> None:
    laps = Laps.since_process_start()
    configuration = configured(options)
    settings = configuration.server()
    warn(configuration)
    if options.print_config:
        print(configuration.toml(), end="")
        return
    runtime = configuration.runtime()
    from flare.http.startup import serve

    serve(runtime, settings, laps)


def run_chat(options: argparse.Namespace) -> None:
    configuration = configured(options)
    warn(configuration)
    settings = configuration.runtime()
    from flare.chat_terminal import run

    run(settings, options.prompt)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 when all went well, 1 for a bad core, 2 for bad input or environment."""
    code = 0
    try:
        options = make_parser().parse_args(arguments)
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has all that it wanted. What is still in the buffer must not be tried again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except FlareError as error:
        print(f"flare: {' '.join(str(error).split())}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


if __name__ == "__main__":
    main()
