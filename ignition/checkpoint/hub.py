"""Names that are not paths: repositories of the Hugging Face hub, and model files that installed packages carry."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from flare.errors import InputError
from ignition.checkpoint.files import reason

_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model"]
_UNWANTED = [
    "*/*",
    "consolidated*",
]  # other runtimes' exports, and the same weights a second time under Mistral's names


def locate(name: str) -> Path:
    """The directory behind a name that is no existing path; downloads what the cache lacks.

    Raises InputError with the remedy when there is nothing behind it.
    """
    if _REPOSITORY.fullmatch(name) and not name.endswith(".gguf"):
        return _snapshot(name)
    raise InputError(f"{name}: no such file or directory, and no repository id (owner/name)")


def packaged_file(package: str, file: str) -> Path | None:
    """The file inside an installed top-level package, which is not imported; None where package or file are missing."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):  # a dotted name without its parent, a module that stands in for a package
        return None
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (path := Path(folder) / file).is_file():
            return path
    return None


def _snapshot(repository: str) -> Path:
    """A directory of the hub's cache with the newest snapshot, or the cached one when HF_HUB_OFFLINE is set."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError:
        problem = "access is gated; accept its terms on the hub, then set HF_TOKEN or run `hf auth login`"
    except RepositoryNotFoundError:
        problem = "the hub has no such repository, or it is private; check the name, or set HF_TOKEN"
    except LocalEntryNotFoundError as error:
        status = _status(error.__cause__)
        if status is None:
            problem = (
                "not in the local cache and the hub cannot be reached; "
                "unset HF_HUB_OFFLINE, check the network, or give a directory"
            )
        else:
            problem = f"not in the local cache and the hub answered {status}; try again later"
    except HfHubHTTPError as error:
        problem = f"the hub answered {_status(error)}; check HF_TOKEN, or try again later"
    except (
        Exception
    ) as error:  # full disks, cut connections: the classes belong to the client's HTTP library and change with it
        problem = f"the download failed ({reason(error)}); files that arrived are kept, run it again for the rest"
    raise InputError(f"{repository}: {problem}")


def _status(error: object) -> int | None:
    """The HTTP status of a hub error."""
    return getattr(getattr(error, "response", None), "status_code", None)
