"""The command `flare`: reads the options, imports what the subcommand needs, and ends with one line if it cannot.

The options are read with argparse: a richer library costs more start-up time than loading a core does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Literal, NoReturn

from flare import __version__
from flare.config import (
    MAX_THREADS,
    RuntimeSettings,
    ServerSettings,
    parse_memory_size,
    read_api_key,
    usable_cpus,
)
from flare.errors import FlareError, InputError
from flare.report import Laps

INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def integer(low: int, high: int):  # type: ignore[no-untyped-def]
    """Returns a reader of integers from `low` to `high`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {low} to {high}")
        return value

    return read


def make_parser() -> Parser:
    """Returns the parser of the whole command line."""
    parser = Parser(prog="flare", description="Serve an exported core: loads and replays, compiles nothing.")
    parser.add_argument("--version", action="version", version=f"flare {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    loading = Parser(add_help=False)
    loading.add_argument("core", metavar="CORE", help="directory of an exported core")
    loading.add_argument(
        "--threads", metavar="N", type=integer(1, MAX_THREADS), help="kernel threads (default: all usable CPUs)"
    )
    loading.add_argument(
        "--max-tokens", metavar="N", type=integer(1, 2**31 - 1), help="most tokens of one answer (default: no limit)"
    )
    loading.add_argument(
        "--kv-memory",
        metavar="SIZE",
        help="memory for keys and values: 2GiB, 800MB, or 40%% of what is free beside the weights "
        "(default: half of that, at most every slot's full context)",
    )
    loading.add_argument(
        "--huge-pages",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="copy the weights into huge pages at load (default: no)",
    )
    loading.add_argument("--verify", action="store_true", help="hash every byte of the weights before serving")

    serve = commands.add_parser("serve", parents=[loading], help="serve a core over HTTP with the OpenAI APIs")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    serve.add_argument(
        "--port",
        metavar="N",
        type=integer(0, 65535),
        default=8000,
        help="port; 0 takes a free one (default: %(default)s)",
    )
    serve.add_argument(
        "--api-key-file", metavar="FILE", type=Path, help="file with the key that clients must send (default: no key)"
    )
    serve.add_argument(
        "--alias",
        metavar="NAME",
        action="append",
        default=[],
        help="name of the model towards clients; may be repeated",
    )
    serve.add_argument(
        "--strict-tools",
        choices=("refuse", "relax"),
        default="refuse",
        help="functions with strict: true are refused, or taken as ones without (default: %(default)s)",
    )
    serve.set_defaults(command=run_serve)

    chat = commands.add_parser("chat", parents=[loading], help="talk to a core in the terminal")
    chat.add_argument("prompt", metavar="PROMPT", nargs="?", help="ask this and leave (default: a conversation)")
    chat.set_defaults(command=run_chat)
    return parser


def runtime_settings(
    options: argparse.Namespace,
    aliases: tuple[str, ...] = (),
    strict_tools: Literal["refuse", "relax"] = "refuse",
) -> RuntimeSettings:
    return RuntimeSettings(
        core=options.core,
        threads=options.threads or usable_cpus(),
        kv_memory=None if options.kv_memory is None else parse_memory_size(options.kv_memory),
        huge_pages=options.huge_pages,
        verify=options.verify,
        aliases=aliases,
        max_tokens=options.max_tokens,
        strict_tools=strict_tools,
    )


def run_serve(options: argparse.Namespace) -> None:
    laps = Laps.since_process_start()
    api_key = "" if options.api_key_file is None else read_api_key(options.api_key_file)
    settings = ServerSettings(host=options.host, port=options.port, api_key=api_key)
    runtime = runtime_settings(options, tuple(name for name in options.alias if name), options.strict_tools)
    from flare.http.startup import serve

    serve(runtime, settings, laps)


def run_chat(options: argparse.Namespace) -> None:
    settings = runtime_settings(options)
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
