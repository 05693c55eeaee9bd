"""The command `flare`: reads the options, imports what the subcommand needs, and ends with one line if it cannot.

The options are read with argparse: a richer library costs more start-up time than loading a core does.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from flare import __version__
from flare.core.sampling import VALID, WHOLE
from flare.errors import FlareError, InputError, NoCore
from flare.report import Laps
from flare.settings import SETTINGS, Names, Number, Setting, Switch, Whole, seen
from flare.sources import Configuration, configure

INTERRUPTED = 130
EXPORTER = ("export", "inspect", "validate")
"""Commands that are looked for here and are those of `ignition`."""


ASKED = (
    Setting(
        "temperature",
        "",
        Number(*VALID["temperature"]),
        "how far the draw strays from the likeliest tokens; 0 takes the likeliest",
        "--temperature T",
        "the core's",
    ),
    Setting(
        "seed", "", Whole(*WHOLE["seed"]), "number that the draw is made from", "--seed N", "the core's, else at random"
    ),
)
"""What `flare chat` sends with each question, bounded as in a request. They are in no table of a configuration file."""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line. Options are written out and may stand between arguments."""

    def __init__(self, **given: Any) -> None:
        super().__init__(allow_abbrev=False, **given)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")

    def read(self, arguments: list[str]) -> argparse.Namespace:
        """Returns the options of a command. Raises InputError, for the first argument that it does not take."""
        options, left = self.parse_known_intermixed_args(arguments)
        for word in left:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                self.error(f"{seen(name)} is no option of `{self.prog}`{meant(name, self._option_string_actions)}")
        if left:
            self.error(f"{seen(left[0])} is one argument too many; what has spaces stands in quotes")
        return options


class Program(Parser):
    """The parser of the whole command line: its first argument is the command, whose own parser takes the rest."""

    commands: Mapping[str, Parser]

    def read(self, arguments: list[str]) -> argparse.Namespace:
        word = arguments[0] if arguments else ""
        if word in self.commands:
            return self.commands[word].read(arguments[1:])
        if word in EXPORTER:
            self.error(f"{word} is a command of the exporter: `ignition {word}`")
        if word and not word.startswith("-"):
            names = " and ".join(self.commands)
            self.error(f"{seen(word)} is no command{meant(word, self.commands)}; there are {names}")
        name = word.partition("=")[0]
        if name.startswith("-") and name not in self._option_string_actions:
            self.error(f"{seen(name)} is no option of `{self.prog}`; those of a command stand behind it")
        return self.parse_args(arguments)


def meant(word: str, names: Iterable[str]) -> str:
    """Returns the end of a complaint that asks whether the name was meant that comes closest."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(names), n=1, cutoff=0.7)
    return f"; is {close[0]} meant?" if close else ""


def destination(setting: Setting) -> str:
    """Returns the name of a parsed option: what is asked is not taken for the server's setting of the same name."""
    return setting.name if setting.table else f"asked_{setting.name}"


def add_option(parser: Parser, setting: Setting) -> None:
    """Adds a setting's option. Its text is read later, with all other sources; None stands for an option not given."""
    text = f"{setting.help} (default: {setting.default_text})".replace("%", "%%").replace("`", "")
    options: dict[str, Any] = {"dest": destination(setting), "help": text, "default": None}
    metavar = setting.option.partition(" ")[2]
    if isinstance(setting.kind, Switch):
        options |= {"action": argparse.BooleanOptionalAction}
    elif isinstance(setting.kind, Names):
        options |= {"action": "append", "metavar": metavar, "help": f"{text}; may be repeated"}
    else:
        options |= {"metavar": metavar}
    parser.add_argument(setting.flag, **options)


def make_parser() -> Program:
    """Returns the parser of the whole command line."""
    parser = Program(prog="flare", description="Serve an exported core: loads and replays, compiles nothing.")
    parser.add_argument("--version", action="version", version=f"flare {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    parser.commands = commands.choices

    loading = Parser(add_help=False)
    loading.add_argument(
        "core",
        metavar="CORE",
        nargs="?",
        help="directory of an exported core (default: the variable FLARE_CORE, else [runtime] core of the file)",
    )
    loading.add_argument(
        "--config", metavar="FILE", help="TOML file with settings (default: the variable FLARE_CONFIG)"
    )
    for setting in SETTINGS:
        if setting.table == "runtime" and setting.flag.startswith("--"):
            add_option(loading, setting)

    serve = commands.add_parser(
        "serve", parents=[loading], help="serve a core over HTTP with the OpenAI and Anthropic APIs"
    )
    for setting in SETTINGS:
        if setting.table == "server" and setting.flag:
            add_option(serve, setting)
    serve.add_argument(
        "--print-config", action="store_true", help="print the settings in effect with their sources, and leave"
    )
    serve.set_defaults(command=run_serve)

    chat = commands.add_parser("chat", parents=[loading], help="talk to a core in the terminal")
    chat.add_argument(
        "prompt",
        metavar="PROMPT",
        nargs="?",
        help="ask this and leave; text piped in stands before it, and alone is a prompt too (default: a conversation)",
    )
    for setting in ASKED:
        add_option(chat, setting)
    chat.set_defaults(command=run_chat)
    return parser


def configured(options: argparse.Namespace) -> Configuration:
    """Returns the settings of all sources. Raises InputError."""
    given = {setting.name: value for setting in SETTINGS if (value := getattr(options, setting.name, None)) is not None}
    return configure(given, config=options.config)


def warn(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"flare: warning: {' '.join(line.split())}", file=sys.stderr)


def run_serve(options: argparse.Namespace) -> None:
    laps = Laps.since_process_start()
    configuration = configured(options)
    settings = configuration.server()
    warn([*configuration.warnings, *configuration.key_warnings(settings)])
    if options.print_config:
        print(configuration.toml(), end="")
        return
    runtime = configuration.runtime()
    from flare.http.startup import serve

    with configuration.naming():
        serve(runtime, settings, laps)


def run_chat(options: argparse.Namespace) -> None:
    configuration = configured(options)
    warn(configuration.warnings)
    asked = {
        setting.name: setting.accept(setting.flag, value, setting.kind.parse)
        for setting in ASKED
        if (value := getattr(options, destination(setting))) is not None
    }
    # What the server does at its start, and for requests that leave something open, is not for the terminal.
    settings = replace(configuration.runtime(), thinking_token_budget=None, temperature=None, check=False)
    from flare.chat_terminal import run

    with configuration.naming():
        try:
            run(settings, options.prompt, asked)
        except NoCore as error:
            lone = options.core is not None and options.prompt is None
            hint = "; a prompt is the second argument: `flare chat CORE PROMPT`" if lone else ""
            raise NoCore(f"{error}{hint}") from None


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 when all went well, 1 for a bad core, 2 for bad input or environment."""
    code = 0
    try:
        options = make_parser().read(sys.argv[1:] if arguments is None else arguments)
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
