"""Failures that nobody expected, in the log: nothing of them can look like a record of its own."""

from __future__ import annotations

import logging
import sys
import traceback

MAX_LOG_CHARACTERS = 20_000


def log_failure(log: logging.Logger, text: str, error: BaseException | None = None) -> None:
    """Logs an exception as an error behind `text`: the given one, or else the one that is being handled, if there is one."""
    error = error or sys.exception()
    log.error("%s%s", text, "" if error is None else "\n" + for_log(error))


def for_log(error: BaseException) -> str:
    """Returns an exception with its traceback, fit for a log: bounded, printable, and indented line by line, so that a
    client's text in it can never look like a record of its own."""
    text = "".join(traceback.format_exception(error))
    if len(text) > MAX_LOG_CHARACTERS:
        half = MAX_LOG_CHARACTERS // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    lines = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.split("\n"))
    return "\n".join(f"  | {line}" for line in lines if line)
