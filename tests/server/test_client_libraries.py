"""Client libraries in versions that the suite's environment does not have, each in an environment of its own: answers whole
and streamed, calls of tools and their results, refusals and failures, through every protocol that the library speaks.

Run with FLARE_RUN_CLIENT_TESTS=1; pip fetches the libraries. docs/clients.md lists the versions.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.opt_in import opt_in
from tests.server.process import ROOT, Process, scripted

LIBRARIES = {
    "openai-1": ("with_openai.py", ["openai==1.109.1"]),
    "openai-2": ("with_openai.py", ["openai==2.54.0"]),
    "anthropic-0": ("with_anthropic.py", ["anthropic==0.125.0"]),
    "anthropic-1": ("with_anthropic.py", ["anthropic==1.17.0"]),
    "litellm": ("with_litellm.py", ["litellm==1.110.2"]),
    "langchain": ("with_langchain.py", ["langchain-openai==1.7.4", "langchain-anthropic==1.7.10"]),
}
KEY = "sk-right"
TEXT = "Hi 😊 there"
CALL = '<tool_call>\n{"name": "read", "arguments": {"path": "/ä", "lines": [1, 2.5]}}\n</tool_call>'
REPLIES = {"USE read": f"<think>A file.</think>Let me look.\n{CALL}", "BREAK": None}
SAYS: dict[str, Any] = {
    "text": TEXT,
    "streamed": TEXT,
    "calls": [["read", {"path": "/ä", "lines": [1, 2.5]}]] * 2,
    "after": TEXT,
    "refused": "BadRequestError",
    "denied": "AuthenticationError",
    "failed": "InternalServerError",
}
"""What every library must make of the server's answers, through every protocol."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with scripted(tmp_path_factory.mktemp("libraries"), REPLIES, plain=TEXT, settings={"api_key": KEY}) as up:
        yield up


@opt_in("libraries from PyPI")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", LIBRARIES)
def test_library(tmp_path: Path, server: Process, name: str) -> None:
    script, packages = LIBRARIES[name]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    command = [python, str(Path(__file__).parent / "clients" / script), server.url, KEY]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    for protocol, says in json.loads(result.stdout.splitlines()[-1]).items():
        assert says == SAYS, protocol


def test_the_documentation_lists_the_versions() -> None:
    documented = (ROOT / "docs" / "clients.md").read_text()
    for _, packages in LIBRARIES.values():
        for package in packages:
            assert re.search(rf"\b{re.escape(package.partition('==')[2])}\b", documented), package
