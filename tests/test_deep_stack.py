"""Definitions that nest as deeply as their bounds let them: an overflow of the stack would end the process."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from flare.deep_stack import on_deep_stack

RULES = """'start: a0\\n' + '\\n'.join(f'a{i}:{"(" * 25}a{i + 1}{")" * 25}' for i in range(3000)) + '\\na3000: "z"'"""
MODELS = """{"$ref": "#/$defs/d0", "$defs": {f"d{i}": {
    "type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1 if i < 2000 else 0}"}}} for i in range(2001)}}"""


@pytest.mark.parametrize(("kind", "definition"), [("lark", RULES), ("json_schema", MODELS)])
def test_deep_definitions_do_not_end_the_process(kind: str, definition: str) -> None:
    program = f"""
from tests.constraints.driving import compiled
from flare.errors import RequestError
try:
    compiled({kind!r}, {definition})
except RequestError:
    pass
print("lives")
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (0, "lives\n"), found.stderr[-500:]


def test_results_and_errors_come_back() -> None:
    assert on_deep_stack(lambda: 3) == 3

    def failing() -> Any:
        raise ValueError("no")

    with pytest.raises(ValueError, match="^no$"):
        on_deep_stack(failing)
