"""The command `ignition`: export, inspect, validate.

Heavy modules are imported inside the commands, so that `--help` answers at once and `inspect` and `validate` work where
torch is not installed. Expected failures are one line on stderr and an exit code: 1 the core is bad, 2 input or environment,
130 interrupted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from flare.errors import FlareError


class Interrupted(FlareError):
    """The user pressed ^C."""

    exit_code = 130  # what a shell reports for a program that SIGINT ended


class Commands(typer.core.TyperGroup):
    """The commands, with an interrupt of our own: typer's versions end differently on a KeyboardInterrupt."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted("interrupted") from None


app = typer.Typer(
    cls=Commands,
    name="ignition",
    help="Exports model recipes into cores that `flare serve` loads.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except FlareError as error:
        print(f"ignition: {error}", file=sys.stderr)
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


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DIR|FILE.gguf", help="A named recipe, a checkpoint directory, or a GGUF file."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="CORE", help="Where to write the core.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|FILE|REPO", help="Weights for a named recipe: a directory, a GGUF file or a hub repository id."
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="auto|f32|bf16|q8|q4", help="Weight format; auto keeps the checkpoint's.")
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
        str, typer.Option(metavar="LEVELS", help="Comma-separated instruction sets to compile for.")
    ] = "x86-64-v4,x86-64-v3,generic",
    sampling_ranges: Annotated[
        str | None,
        typer.Option(
            metavar="author|open",
            help="Ranges of sampling fields; default: the author's where the recipe has them, else open.",
        ),
    ] = None,
    prompt_logprobs: Annotated[
        bool, typer.Option("--prompt-logprobs", help="Add graphs that score prompts (not available yet).")
    ] = False,
    target: Annotated[str, typer.Option(metavar="cpu", help="What the core runs on.")] = "cpu",
) -> None:
    """Exports a model into a core directory: compiles its graphs, packs its weights and proves the result."""
    from ignition.export import export_core
    from ignition.options import Options
    from ignition.progress import ConsoleProgress

    options = Options(
        weights=weights,
        max_context=max_context,
        slots=slots,
        page_tokens=page_tokens,
        max_step_tokens=max_step_tokens,
        isas=tuple(part.strip() for part in isa.split(",") if part.strip()),
        sampling_ranges=sampling_ranges,
        prompt_logprobs=prompt_logprobs,
        target=target,
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
) -> None:
    """Accepts or refuses a core: every byte, every offset, the tokenizer, the template and the oracle's answers.

    Exit code 0: good. 1: the core is bad. 2: the command could not be carried out.
    """
    from ignition.validate import validate_core

    result = validate_core(core)
    if junit is not None:
        result.write_junit(junit)
    typer.echo(result.json() if json else result.text())
    raise typer.Exit(result.exit_code)


if __name__ == "__main__":
    main()
