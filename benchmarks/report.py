"""Turns measured rows into Markdown tables and puts them between the markers of a document."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
Row = dict[str, Any]

# figure: (heading, decimals, True where a smaller value is the better one)
STEP_FIGURES = {
    "load_s": ("load, s", 3, True),
    "prefill_512": ("prefill 512, tokens/s", 0, False),
    "decode_1": ("decode 1, tokens/s", 0, False),
    "decode_4": ("decode 4, tokens/s", 0, False),
    "decode_8": ("decode 8, tokens/s", 0, False),
    "decode_16": ("decode 16, tokens/s", 0, False),
    "rss_mb": ("resident memory, MiB", 0, True),
}


def steps(rows: list[Row]) -> str:
    """A line for each weight format and figure: both medians, and the ratio within the rounds."""
    lines = ["| weights | | flare | llama.cpp | times better |", "|---|---|---:|---:|---:|"]
    for weights in unique(row["weights"] for row in rows):
        ours = pick(rows, weights=weights, engine="flare")
        theirs = pick(rows, weights=weights, engine="llama.cpp")
        for figure, (heading, decimals, smaller) in STEP_FIGURES.items():
            cells = [f"{median(side, figure):.{decimals}f}" for side in (ours, theirs)]
            lines.append(f"| {weights} | {heading} | {' | '.join(cells)} | {ratio(ours, theirs, figure, smaller)} |")
    return "\n".join(lines)


def neighbour(rows: list[Row]) -> str:
    """A line for each engine and weight format: decode at 1 alone and beside a busy process."""
    lines = ["| weights | | alone, tokens/s | beside a busy process | kept |", "|---|---|---:|---:|---:|"]
    for weights in unique(row["weights"] for row in rows):
        for engine in unique(row["engine"] for row in rows):
            some = pick(rows, weights=weights, engine=engine)
            alone, busy = median(some, "decode_1_alone"), median(some, "decode_1_busy")
            lines.append(f"| {weights} | {engine} | {alone:.0f} | {busy:.0f} | {median(some, 'kept'):.2f} |")
    return "\n".join(lines)


def prompts(rows: list[Row]) -> str:
    """A line: both medians of the time from messages to token ids, and the ratio within the rounds."""
    ours, theirs = pick(rows, engine="flare"), pick(rows, engine="transformers")
    cells = [f"{1000 * median(side, 'seconds'):.0f}" for side in (ours, theirs)]
    size = f"{ours[0]['messages']} | {ours[0]['tokens']}"
    return "\n".join(
        [
            "| messages | tokens | flare, ms | transformers, ms | times better |",
            "|---:|---:|---:|---:|---:|",
            f"| {size} | {' | '.join(cells)} | {ratio(ours, theirs, 'seconds', True)} |",
        ]
    )


def sampling(rows: list[Row]) -> str:
    """A line for each setting: microseconds a row at each vocabulary, the median over rounds."""
    vocabularies = unique(row["vocabulary"] for row in rows)
    lines = [
        "| | " + " | ".join(f"{size} tokens, µs" for size in vocabularies) + " |",
        "|---" + "|---:" * len(vocabularies) + "|",
    ]
    for setting in unique(row["setting"] for row in rows):
        cells = [f"{median(pick(rows, setting=setting, vocabulary=size), 'us'):.0f}" for size in vocabularies]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    return "\n".join(lines)


def masks(rows: list[Row]) -> str:
    """A line for each form and vocabulary: what compiling and a token cost, and by how much a decode step of one row with masks
    takes longer than one without, for the core's own vocabulary (the smaller one). Then what tables took to make."""
    headings = ["compiling, ms", "a token, µs", "the slowest, µs", "a step takes longer by"]
    lines = [f"| form | vocabulary | {' | '.join(headings)} |", f"|---|---:{'|---:' * len(headings)}|"]
    own = min(row["vocabulary"] for row in rows)
    widths = unique(row["vocabulary"] for row in rows)
    for vocabulary in widths:
        for form in unique(row["form"] for row in rows):
            some = pick(rows, form=form, vocabulary=vocabulary)
            figures = [f"{median(some, 'compile_ms'):.1f}"]
            figures += [f"{median(some, name):.0f}" for name in ("token_us", "slowest_us")]
            longer = median(some, "masked_step_us") / median(some, "step_us") - 1 if vocabulary == own else None
            figures.append("" if longer is None else f"{longer:.1%}")
            lines.append(f"| {form} | {vocabulary} | {' | '.join(figures)} |")
    made = [f"{width}: {median(pick(rows, vocabulary=width), 'tables_s'):.2f} s" for width in widths]
    return "\n".join([*lines, "", f"Making a vocabulary's tables, once, took by its size: {', '.join(made)}."])


def serving(rows: list[Row]) -> str:
    """A line for each number of clients, weight format and server; flare's has its ratio to the other on these bits."""
    headings = ["tokens/s", "times better", "first text, s", "95 %", "between texts, ms", "memory (PSS), MiB"]
    lines = [f"| clients | weights | server | {' | '.join(headings)} |", f"|---:|---|---{'|---:' * len(headings)}|"]
    for clients in unique(row["clients"] for row in rows):
        for server, weights in unique((row["server"], row["weights"]) for row in rows):
            some = pick(rows, clients=clients, server=server, weights=weights)
            figures = [
                f"{median(some, 'tokens_s'):.0f}", against(pick(rows, clients=clients), some, "tokens_s", False),
                f"{median(some, 'ttft_s'):.2f}", f"{median(some, 'ttft_p95_s'):.2f}",
                f"{median(some, 'gap_ms'):.1f}", f"{median(some, 'pss_mb'):.0f}",
            ]  # fmt: skip
            short = " (answers ended early)" if min(row["length_share"] for row in some) < 0.99 else ""
            lines.append(f"| {clients} | {weights} | {server}{short} | {' | '.join(figures)} |")
    return "\n".join(lines)


def cold_start(rows: list[Row]) -> str:
    """A line for each server and weight format: median and range of the time to the first token, and memory."""
    headings = ["ready, s", "first token, s", "range", "times better", "memory (PSS), MiB"]
    lines = [f"| weights | server | {' | '.join(headings)} |", f"|---|---{'|---:' * len(headings)}|"]
    for server, weights in unique((row["server"], row["weights"]) for row in rows):
        some = pick(rows, server=server, weights=weights)
        tokens = [row["token_s"] for row in some]
        figures = [
            f"{median(some, 'ready_s'):.2f}", f"{median(some, 'token_s'):.3f}", f"{min(tokens):.3f}-{max(tokens):.3f}",
            against(rows, some, "token_s", True), f"{median(some, 'pss_mb'):.0f}",
        ]  # fmt: skip
        lines.append(f"| {weights} | {server} | {' | '.join(figures)} |")
    if not pick(rows, server="transformers serve"):
        lines += ["", "`transformers serve` was not measured: `transformers[serving]` was not installed."]
    return "\n".join(lines)


def against(rows: list[Row], ours: list[Row], figure: str, smaller_is_better: bool) -> str:
    """flare's ratio to the llama-cpp-python server on the same weights; empty for others, or without that opponent."""
    theirs = pick(rows, server="llama-cpp-python", weights=ours[0]["weights"])
    return ratio(ours, theirs, figure, smaller_is_better) if ours[0]["server"] == "flare" and theirs else ""


def foreign(rows: list[Row]) -> str:
    """One sentence on what others used of the machine while `rows` were measured."""
    shares = [row["foreign"] for row in rows]
    middle, highest = statistics.median(shares), max(shares)
    return f"Other processes used {middle:.1%} of the machine meanwhile (median; at most {highest:.1%})."


def ratio(ours: list[Row], theirs: list[Row], figure: str, smaller_is_better: bool) -> str:
    """How many times better ours is: the median over rounds, with the range."""
    pairs = [(a[figure], b[figure]) for a in ours for b in theirs if a["round"] == b["round"]]
    ratios = sorted(theirs / ours if smaller_is_better else ours / theirs for ours, theirs in pairs)
    return f"**{statistics.median(ratios):.2f}** ({ratios[0]:.2f}-{ratios[-1]:.2f})"


def write(document: Path, text: str) -> None:
    """Replaces what stands between the markers of `document`. Raises ValueError where a marker is missing."""
    before, begin, rest = document.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{document} has no lines {BEGIN} and {END} to write the figures between")
    document.write_text(f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")


def table(values: dict[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in values.items())])


def pick(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def median(rows: list[Row], figure: str) -> float:
    return statistics.median(row[figure] for row in rows)


def unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
