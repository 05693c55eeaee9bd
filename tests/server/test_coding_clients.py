"""Real coding agents on a real task against the scripted server: they read a file, mend it, and run its test.

Run with FLARE_RUN_CLIENT_TESTS=1 and `claude`, `codex` and `opencode` on PATH (npm: @anthropic-ai/claude-code@2.1.296,
@openai/codex@0.162.1, opencode-ai@1.18.33). The script stands for the model; everything else is as with a model.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.server.opt_in import opt_in
from tests.server.process import scripted

pytestmark = opt_in("clients from npm")

WRONG, RIGHT = "return a - b", "return a + b"
PROGRAM = f"def add(a, b):\n    {WRONG}\n"
CHECK = "from calc import add\n\nassert add(2, 3) == 5\nopen('passed', 'w').close()\nprint('all good')\n"
PATCH = f"*** Begin Patch\n*** Update File: calc.py\n@@\n-    {WRONG}\n+    {RIGHT}\n*** End Patch\n"
TASK = "The test in check.py fails. Read calc.py, mend it, and run python3 check.py."
DONE = "Mended: calc.py adds now and the check passes."


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "calc.py").write_text(PROGRAM)
    (folder / "check.py").write_text(CHECK)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def run(project: Path, command: list[str], **environment: str) -> str:
    """Runs a client in the project to its end; returns what it printed."""
    assert shutil.which(command[0]), f"{command[0]} is not on PATH"
    result = subprocess.run(
        command,
        cwd=project,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout


def check(project: Path, output: str) -> None:
    assert RIGHT in (project / "calc.py").read_text()
    assert (project / "passed").exists(), "the client did not run the check"
    assert DONE in output


@pytest.mark.parametrize("mode", [[], ["--bare"]], ids=["normal", "bare"])
def test_claude_code(tmp_path: Path, project: Path, mode: list[str]) -> None:
    file = str(project / "calc.py")
    replies = [
        "<think>First the file.</think>I read the file first.\n" + call("Read", file_path=file),
        call("Edit", file_path=file, old_string=WRONG, new_string=RIGHT),
        call("Bash", command="python3 check.py", description="Run the check"),
        DONE,
    ]
    with scripted(tmp_path, replies) as server:
        output = run(
            project,
            ["claude", *mode, "-p", TASK, "--dangerously-skip-permissions", "--output-format", "json"],
            ANTHROPIC_BASE_URL=server.url,
            ANTHROPIC_API_KEY="local",
            ANTHROPIC_MODEL="org/tiny",
            IS_SANDBOX="1",
            CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
            HOME=str(tmp_path),
        )
    answer = json.loads(output)
    assert answer["is_error"] is False and answer["num_turns"] == 4
    check(project, answer["result"])


CODEX_MODEL = {
    "slug": "org/tiny",
    "display_name": "Tiny",
    "supported_reasoning_levels": [{"effort": "low", "description": "low"}],
    "default_reasoning_level": "low",
    "shell_type": "unified_exec",
    "visibility": "list",
    "supported_in_api": True,
    "priority": 1,
    "support_verbosity": False,
    "truncation_policy": {"mode": "tokens", "limit": 10000},
    "experimental_supported_tools": [],
    "base_instructions": "You are a coding agent.",
    "apply_patch_tool_type": "freeform",
    "context_window": 200000,
    "max_context_window": 200000,
    "input_modalities": ["text"],
}


def test_codex(tmp_path: Path, project: Path) -> None:
    replies = [
        "<think>First the file.</think>" + call("exec_command", cmd="cat calc.py"),
        call("apply_patch", input=PATCH),
        call("exec_command", cmd="python3 check.py"),
        DONE,
    ]
    home = tmp_path / ".codex"
    home.mkdir()
    (home / "catalog.json").write_text(json.dumps({"models": [CODEX_MODEL]}))
    with scripted(tmp_path, replies) as server:
        (home / "config.toml").write_text(
            'model = "org/tiny"\nmodel_provider = "flare"\nweb_search = "disabled"\n'
            f'model_catalog_json = "{home}/catalog.json"\n'
            "check_for_update_on_startup = false\n[analytics]\nenabled = false\n"
            f'[model_providers.flare]\nname = "flare"\nbase_url = "{server.url}/v1"\nenv_key = "FLARE_KEY_FOR_CODEX"\n'
            'wire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        command = ["codex", "exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", TASK]
        output = run(project, command, CODEX_HOME=str(home), HOME=str(tmp_path), FLARE_KEY_FOR_CODEX="local")
    check(project, output)


def test_opencode(tmp_path: Path, project: Path) -> None:
    file = str(project / "calc.py")
    replies = [
        call("read", filePath=file),
        call("edit", filePath=file, oldString=WRONG, newString=RIGHT),
        call("bash", command=f"cd {project} && python3 check.py", description="Run the check"),
        DONE,
    ]
    folder = tmp_path / ".config" / "opencode"
    folder.mkdir(parents=True)
    with scripted(tmp_path, replies) as server:
        model = {"name": "Tiny", "tool_call": True, "limit": {"context": 200000, "output": 8192}}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "flare",
            "options": {"baseURL": f"{server.url}/v1", "apiKey": "local"},
            "models": {"org/tiny": model},
        }
        settings = {
            "autoupdate": False,
            "share": "disabled",
            "model": "flare/org/tiny",
            "small_model": "flare/org/tiny",
        }
        settings |= {"enabled_providers": ["flare"], "provider": {"flare": provider}}
        (folder / "opencode.json").write_text(json.dumps(settings))
        output = run(
            project,
            ["opencode", "run", "--auto", TASK],
            HOME=str(tmp_path),
            XDG_CONFIG_HOME=str(tmp_path / ".config"),
            OPENCODE_DISABLE_MODELS_FETCH="1",
        )
    check(project, output)
