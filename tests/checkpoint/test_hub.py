"""Names that are not paths, resolved in a fresh process each time, as a command would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flare.errors import InputError
from ignition.checkpoint import open_checkpoint
from tests.checkpoint.hub_double import Hub, serve
from tests.support.checkpoints import make_checkpoint

REPOSITORY = "tiny-labs/tiny-llama"

OPEN = """
import json, sys
from flare.errors import InputError
from ignition.checkpoint import open_checkpoint
try:
    checkpoint = open_checkpoint(sys.argv[1])
except InputError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"name": checkpoint.name, "source": checkpoint.source, "tensors": len(checkpoint.tensors)}))
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("hub") / "llama", shards=True)


@pytest.fixture
def hub(directory: Path) -> Hub:
    hub = Hub(REPOSITORY, directory)
    hub.files["pytorch_model.bin"] = hub.files["consolidated.safetensors"] = b"not wanted"
    return hub


def open_in_process(cache: Path, hub: Hub, name: str = REPOSITORY, *, offline: bool = False, before: str = "") -> dict:
    """What opening `name` prints in a fresh process whose hub is the double and whose cache is `cache`."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = kept | {
        "HF_HOME": str(cache),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_XET": "1",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "NO_PROXY": "127.0.0.1",
    }
    command = [sys.executable, "-c", before + OPEN, name]
    done = subprocess.run(command, env=environment, cwd=cache, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_repository_is_fetched_once_and_then_opens_without_the_hub(hub: Hub, tmp_path: Path) -> None:
    with serve(hub):
        opened = open_in_process(tmp_path, hub)
        assert opened["name"] == REPOSITORY
        assert opened["tensors"] == 21
        assert set(hub.downloaded()) == set(hub.files) - {"pytorch_model.bin", "consolidated.safetensors"}

        hub.requests.clear()
        hub.files["generation_config.json"] = b'{"temperature": 0.5}'
        again = open_in_process(tmp_path, hub)
        assert hub.downloaded() == ["generation_config.json"], "only what changed is fetched again"
    assert open_in_process(tmp_path, hub) == again, "an unreachable hub does not matter once everything is cached"
    assert open_in_process(tmp_path, hub, offline=True) == again


def test_a_cut_connection_resumes_where_the_client_stood(hub: Hub, tmp_path: Path) -> None:
    """The client takes 10 MiB at a time: of 22 MiB, cut in the middle, it has the first ten."""
    hub.files["extra.safetensors"] = bytes(range(256)) * (22 << 12)
    hub.cut = "extra.safetensors"
    with serve(hub):
        opened = open_in_process(tmp_path, hub)
    assert (Path(opened["source"]) / "extra.safetensors").read_bytes() == hub.files["extra.safetensors"]
    assert f"bytes={10 << 20}-" in [ranged for _, path, ranged in hub.requests if path.endswith("extra.safetensors")]


def test_a_full_disk_is_one_line_and_the_next_run_fetches_the_rest(hub: Hub, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))\n"
    with serve(hub):
        error = open_in_process(tmp_path, hub, before=limit)["error"]
        assert error.startswith(f"{REPOSITORY}: the download failed (File too large)")
        assert "\n" not in error
        hub.requests.clear()
        assert open_in_process(tmp_path, hub)["tensors"] == 21


@pytest.mark.parametrize(
    ("status", "words"),
    [
        ((401, "RepoNotFound"), "no such repository, or it is private; check the name, or set HF_TOKEN"),
        ((404, "RepoNotFound"), "no such repository"),
        ((403, "GatedRepo"), "access is gated; accept its terms"),
        ((503, ""), "the hub answered 503"),
    ],
)
def test_refusals_of_the_hub_are_one_line_with_a_remedy(
    hub: Hub, tmp_path: Path, status: tuple[int, str], words: str
) -> None:
    hub.status = status
    with serve(hub):
        error = open_in_process(tmp_path, hub)["error"]
    assert error.startswith(f"{REPOSITORY}: ") and words in error and "\n" not in error


def test_a_gated_repository_with_a_public_listing_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    with serve(hub):
        assert "access is gated" in open_in_process(tmp_path, hub)["error"]


def test_offline_without_a_cache_names_the_switch(hub: Hub, tmp_path: Path) -> None:
    hub.url = "http://127.0.0.1:9"  # the discard port: nothing listens
    for offline in (True, False):
        error = open_in_process(tmp_path, hub, offline=offline)["error"]
        assert "HF_HUB_OFFLINE" in error and "not in the local cache" in error


@pytest.mark.parametrize("name", ["no-such-thing", "models/missing.gguf", "/absent/directory", "../up", "a/b/c"])
def test_names_that_are_nothing_say_so(name: str) -> None:
    with pytest.raises(InputError, match="no such file or directory, and no repository id"):
        open_checkpoint(name)


def test_a_name_that_the_file_system_refuses_is_one_line() -> None:
    with pytest.raises(InputError, match="cannot be read .File name too long"):
        open_checkpoint("x" * 300)
