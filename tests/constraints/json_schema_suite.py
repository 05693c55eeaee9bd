"""The JSON-Schema-Test-Suite, draft 2020-12, as `suite.json` holds it: {file: [{description, schema, tests}, ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    """A schema of the suite, and values with whether they are of it."""

    name: str
    schema: Any
    values: list[tuple[Any, bool]]


def cases() -> Iterator[Case]:
    for file, found in json.loads((Path(__file__).parent / "suite.json").read_text())["tests"].items():
        for case in found:
            values = [(test["data"], test["valid"]) for test in case["tests"]]
            yield Case(f"{file}: {case['description']}", case["schema"], values)
