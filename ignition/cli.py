"""The command `ignition`: export, inspect, validate.

Heavy modules are imported inside the commands, so that `--help` answers at once and `inspect` and `validate` work where
torch is not installed. Expected failures are one line on stderr and an exit code: 1 the core is bad, 2 input or environment,
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
import typer.core

from flare.errors import FlareError, InputError

PROGRAM = "ignition"
SERVER = ("serve", "chat")
"""Commands that are looked for here and are those of `flare`."""

EXPORT_PACKAGES = ("torch", "transformers", "huggingface_hub")
UsageError: Any = typer.BadParameter.__base__
"""The base of typer's complaints about a command line, which has no public name in all of its versions."""


class Interrupted(FlareError):
    """The user pressed ^C."""

    exit_code = 130  # what a shell reports for a program that SIGINT ended


class Commands(typer.core.TyperGroup):
    """The commands, with complaints and an interrupt of our own: typer's take several lines and differ between versions."""

    def main(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Runs the command and exits with its code. Raises FlareError for what it refuses."""
        try:
            sys.exit(super().main(*arguments, **settings | {"standalone_mode": False}))
        except typer.Abort:
            raise Interrupted("interrupted") from None
        except UsageError as error:
            raise InputError(complaint(error, self)) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None


def complaint(error: Any, program: Commands) -> str:
    """Returns the one line of a usage error, with the help of the command that it concerns."""
    given = sys.argv[1] if len(sys.argv) > 1 else ""
    command = PROGRAM if given not in program.commands else f"{PROGRAM} {given}"
    text = error.format_message()
    if given and not given.startswith("-") and command == PROGRAM:
        text = f"{given!r} is no command{meant(given, program.commands)}; there are {', '.join(program.commands)}"
        if given in SERVER:
            text = f"{given} is a command of the server: `flare {given}`"
    return f"{text.rstrip('.')}; see `{command} --help`"


def meant(word: str, names: Iterable[str]) -> str:
    """Returns the end of a complaint that asks whether the name was meant that comes closest."""
    from difflib import get_close_matches

    close = get_close_matches(word, list(names), n=1, cutoff=0.7)
    return f"; is {close[0]} meant?" if close else ""


app = typer.Typer(
    cls=Commands,
    name="ignition",
    help="Exports model recipes into cores that `flare serve` loads.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name=PROGRAM)
    except FlareError as error:
        print(f"ignition: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        from ignition import __version__

        typer.echo(f"ignition {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def require_export_packages(cuda: bool = False) -> None:
    """Raises InputError where what the extra `export` installs (for cuda, `export-cuda`) is missing or cannot be imported."""
    from importlib import import_module
    from importlib.util import find_spec

    wanted, extra = ((*EXPORT_PACKAGES, "triton"), "export-cuda") if cuda else (EXPORT_PACKAGES, "export")
    missing = [name for name in wanted if find_spec(name) is None]
    if missing:
        raise InputError(
            f"an export needs {', '.join(missing)}, which this Python ({sys.executable}) does not have; install the "
            f"extra {extra}: pip install 'flare-ignition[{extra}]', in a checkout pip install '.[{extra}]'"
        )
    try:
        import_module("torch")
    except (ImportError, OSError) as error:  # OSError: one of its libraries does not load
        raise InputError(f"torch cannot be imported ({error}); install it anew") from None


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DIR|FILE.gguf", help="A named recipe, a checkpoint directory, or a GGUF file."),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="CORE", help="Where to write the core; one there is replaced.")
    ],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE|REPO", help="Weights for a named recipe: a directory, a GGUF file or a hub repository id."
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="auto|f32|bf16|q8|q4|fp8", help="Weight format; auto keeps the checkpoint's, fp8 is for cuda only."
        ),
    ] = "auto",
    max_context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Longest prompt plus answer; default: what the model was trained for."),
    ] = None,
    slots: Annotated[int, typer.Option(metavar="N", help="Most requests that run at once.")] = 32,
    page_tokens: Annotated[
        int, typer.Option(metavar="N", help="Token positions in one kv page, a multiple of 16.")
    ] = 16,
    max_step_tokens: Annotated[
        int, typer.Option(metavar="N", help="Most tokens of one step, prompts and answers together.")
    ] = 512,
    isa: Annotated[
        str | None,
        typer.Option(
            metavar="LEVELS",
            help="Comma-separated instruction sets of what runs on the processor; default: x86-64-v4,x86-64-v3,generic.",
        ),
    ] = None,
    sampling_ranges: Annotated[
        str | None,
        typer.Option(
            metavar="author|open",
            help="Ranges of sampling fields; default: the author's where the recipe has them, else open.",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        bool,
        typer.Option("--prompt-logprobs", help="Score prompts too: makes room for the logits of 64 tokens a step."),
    ] = False,
    target: Annotated[
        list[str] | None,
        typer.Option(
            metavar="cpu|cuda:ARCH,...",
            help="What the core runs on, such as cuda:sm_90a; repeat it for both kinds. Default: cpu.",
        ),
    ] = None,
    cpu_fallback: Annotated[
        bool,
        typer.Option(
            "--cpu-fallback/--no-cpu-fallback",
            help="Have the processor run ops without a kernel of a target, or refuse.",
        ),
    ] = True,
) -> None:
    """Exports a model into a core directory: compiles its graphs, packs its weights and proves the result."""
    require_export_packages(cuda=any(name.startswith("cuda:") for name in target or ()))
    from ignition.export import export_core
    from ignition.options import Options
    from ignition.progress import ConsoleProgress

    options = Options(
        weights=weights,
        max_context=max_context,
        slots=slots,
        page_tokens=page_tokens,
        max_step_tokens=max_step_tokens,
        isas=None if isa is None else tuple(part.strip() for part in isa.split(",") if part.strip()),
        sampling_ranges=sampling_ranges,
        prompt_logprobs=prompt_logprobs,
        targets=tuple(target or ("cpu",)),
        cpu_fallback=cpu_fallback,
    )
    report = export_core(source, output, options, checkpoint=checkpoint, progress=ConsoleProgress())
    typer.echo(report.text())


@app.command()
def inspect(
    core: Annotated[Path, typer.Argument(metavar="CORE", help="A core directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Shows what a core is and what it can serve. Checks hashes of everything but the weights."""
    from ignition.inspect import describe, render

    facts = describe(core)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2, sort_keys=True, ensure_ascii=False))
    else:
        typer.echo(render(facts))


@app.command()
def validate(
    core: Annotated[Path, typer.Argument(metavar="CORE", help="A core directory.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write a JUnit XML report.")] = None,
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Only what computes: weights, kernels, graphs and the oracle's replay.")
    ] = False,
) -> None:
    """Accepts or refuses a core: every byte, every offset, the tokenizer, the template and the oracle's answers.

    Exit code 0: good. 1: the core is bad. 2: the command could not be carried out.
    """
    from ignition.validate import validate_core

    result = validate_core(core, numerics=numerics)
    if junit is not None:
        result.write_junit(junit)
    typer.echo(result.json() if json else result.text())
    raise typer.Exit(result.exit_code)


if __name__ == "__main__":
    main()
