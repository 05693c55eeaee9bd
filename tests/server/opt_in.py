"""Tests of other people's programs, which the default run leaves out: what they need is fetched or brought along."""

from __future__ import annotations

import os

import pytest


def opt_in(needs: str) -> pytest.MarkDecorator:
    """Returns the mark of tests that run only where they are asked for; `needs` is what they take besides."""
    return pytest.mark.skipif(
        os.environ.get("FLARE_RUN_CLIENT_TESTS") != "1", reason=f"FLARE_RUN_CLIENT_TESTS=1 runs them; they need {needs}"
    )
