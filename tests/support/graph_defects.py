"""Defects to plant in the graphs of `tests.support.cuda_graphs`, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from flare.core.cuda_checks import check_cuda_graphs
from flare.core.cuda_graph import CudaGraphs
from flare.core.manifest import Manifest
from flare.errors import CoreError
from tests.support.cuda_graphs import file_of, make_manifest

ARCHITECTURE = "sm_90a"
WHERE = file_of(ARCHITECTURE)
Change = Callable[[dict[str, Any]], object]

STEP, SCALE, DOT, FILL = (
    r"step\[1\] node ",
    r"step[1] node 6 ('scale')",
    "step[1] node 5 ('dot')",
    "step[1] node 4 ('clear')",
)


def changed(graphs: CudaGraphs, change: Change) -> CudaGraphs:
    plain = msgspec.to_builtins(graphs)
    change(plain)
    return msgspec.convert(plain, CudaGraphs)


def refused(graphs: CudaGraphs, files: dict[str, bytes], manifest: Manifest | None = None, where: str = WHERE) -> str:
    with pytest.raises(CoreError) as caught:
        check_cuda_graphs(graphs, manifest or make_manifest(ARCHITECTURE), files, where)
    message = str(caught.value)
    assert message.startswith(f"{where}: ") and message.endswith("; export the core again")
    assert "\n" not in message and len(message) < 400
    return message


def node(graphs: dict[str, Any], index: int, kind: str = "step", bucket: int = 1) -> dict[str, Any]:
    return graphs[kind][bucket]["nodes"][index]


def arg(graphs: dict[str, Any], number: int, index: int = 6) -> dict[str, Any]:
    return node(graphs, index)["args"][number]


def pointer(segment: str, offset: int, size: int) -> dict[str, Any]:
    return {"kind": "pointer", "segment": segment, "offset": offset, "bytes": size}


def scalar(kind: str, value: float) -> dict[str, Any]:
    return {"kind": "scalar", "type": kind, "value": value}


def put(number: int, value: dict[str, Any], index: int = 6) -> Change:
    """Replaces an argument: of a scaling (6: source, target, count, factor, scratch) or a product (5)."""
    return lambda g: node(g, index)["args"].__setitem__(number, value)
