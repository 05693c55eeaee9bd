"""flare stays thin: the import rules hold in the source, and in the running server."""

from __future__ import annotations

import http.client
import json
import re
import subprocess
import sys
from pathlib import Path

HEAVY = {"torch", "triton", "transformers", "ignition", "recipes"}

IMPORT_EVERYTHING = """
import importlib, pkgutil, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {heavy!r}:
            raise ImportError("flare imports " + name)

sys.meta_path.insert(0, Refuse())
import flare
for module in pkgutil.walk_packages(flare.__path__, "flare."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith("flare.")]))
"""


def test_import_rules(repository: Path) -> None:
    """The contracts in pyproject.toml, over the import graph of the source."""
    lint = "from importlinter.cli import lint_imports_command as command; command()"
    result = subprocess.run([sys.executable, "-c", lint, "--no-cache"], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "5 kept, 0 broken" in result.stdout, result.stdout


def test_every_module_of_flare_imports_without_the_exporter(repository: Path) -> None:
    """Imports all of flare in a process where torch, transformers, triton, ignition and recipes cannot be imported."""
    program = IMPORT_EVERYTHING.format(heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 30, "the walk over flare's modules found next to nothing"


def test_a_server_that_answers_has_imported_nothing_heavy(repository: Path, tiny_core: Path) -> None:
    """By the interpreter's own list of imports. numpy may come later, but may not delay the start."""
    command = [sys.executable, "-X", "importtime", "-m", "flare.cli", "serve", str(tiny_core), "--port", "0"]
    with subprocess.Popen(command, cwd=repository, stderr=subprocess.PIPE, text=True) as process:
        before, port = [], 0
        try:
            for line in process.stderr:
                before.append(line)
                if found := re.search(r"^serving .*:(\d+)/", line):
                    port = int(found[1])
                    break
            assert port, "".join(before[-20:])
            connection = http.client.HTTPConnection("127.0.0.1", port)
            body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            connection.close()
        finally:
            process.terminate()
        after = process.stderr.readlines()
    assert not imported(before + after) & HEAVY
    assert "aiohttp" in imported(before), "the list of imports was not understood"
    assert "numpy" not in imported(before)


def imported(lines: list[str]) -> set[str]:
    """Top-level names in the output of -X importtime."""
    names = (line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:"))
    return {name.partition(".")[0] for name in names}
