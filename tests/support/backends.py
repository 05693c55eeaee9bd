"""Cores of both targets, and what would serve a core."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from flare.backend import choose_backend
from flare.config import RuntimeSettings
from flare.core.directory import open_core
from flare.fallbacks import Fallbacks
from tests.support.forged_targets import add_cuda


def with_cuda(core: Path, folder: Path) -> Path:
    """A copy of a core with a forged cuda target beside its own."""
    copy = Path(shutil.copytree(core, folder))
    add_cuda(copy)
    return copy


def settings(core: Path, **given: Any) -> RuntimeSettings:
    return RuntimeSettings(core=str(core), threads=1, **given)


def choose(core: Path, **given: Any) -> Any:
    """The backend that serves a core under these settings."""
    chosen = settings(core, **given)
    return choose_backend(open_core(core), chosen, Fallbacks(allowed=chosen.cpu_fallback))
