"""Cores with any one value of a file changed, behind hashes that are right: each is refused by name, in one line, or opens.

What opens all the same is of a kind that docs/core-format.md says no check can tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flare.core.directory import open_core
from flare.errors import CoreError, InputError
from flare.replay.cuda import CudaReplay
from flare.replay.cuda_driver import open_device
from flare.replay.cuda_program import CudaProgram
from flare.tables import check_tables
from tests.support.fake_cuda.library import FakeCuda
from tests.support.forged_cores import forge, sign
from tests.support.mutations import Place, at, mutations, places, put

MANIFEST, GRAPHS = "core.json", "graphs/cuda-sm_90a.msgpack"
UNTOLD = frozenset("label source constants signature promotion shared programmatic grid kernel boxes kind".split())
"""Fields of a graph file that a check may let pass whatever they are: labels, and what only a kernel's code could tell."""


@pytest.fixture(scope="module")
def mutated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A core for sm_90a, whose cubins are empty, to be changed."""
    import ignition.targets.cuda.export as cuda_export
    from ignition.export import export_core
    from ignition.options import Options
    from tests.support.checkpoints import TINY_CUDA, make_checkpoint
    from tests.support.stub_cubins import compile_stubs

    folder = tmp_path_factory.mktemp("mutated")
    options = Options(targets=("cuda:sm_90a",), slots=2, max_step_tokens=4, max_context=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_export, "compile_launches", compile_stubs)
        return export_core(str(make_checkpoint(folder / "checkpoint", **TINY_CUDA)), folder / "core", options).output


def opens(core: Path) -> None:
    """Opens a core on the fake device, as a server does, and closes it."""
    opened = open_core(core)
    check_tables(opened.manifest)
    assert opened.manifest.cuda is not None
    device = open_device(list(opened.manifest.cuda.architectures))
    try:
        program = CudaProgram.open(opened, device.architecture)
        program.check_shared(device)
        CudaReplay(program, device=device, kv_pages=4).close()
    finally:
        device.close()


def refusal(core: Path) -> str | None:
    """Why a core is refused, None where it is not. No other exception than a refusal may come, and no longer or other text."""
    try:
        opens(core)
    except (CoreError, InputError) as error:
        message = str(error)
        assert message.isprintable() and len(message) < 1000, message
        return message
    return None


Draw = Callable[[st.SearchStrategy[Any]], Any]


def mutate(tree: Any, draw: Draw) -> tuple[Place, Any]:
    """Draws one of the tree's mutations: the place that is another then, and the tree."""
    place = draw(st.sampled_from(list(places(tree))))
    within, value = draw(st.sampled_from(list(mutations(at(tree, place)))))
    return (*place, *within), put(tree, place, value)


def may_pass(graphs: Any, place: Place) -> bool:
    """Whether a change at this place of a graph file may go unnoticed."""
    if UNTOLD.intersection(place[1:]):
        return True
    if place[-1] == "bytes":  # nothing says how much a kernel uses of its memory
        return at(graphs, place[:-1])["segment"] == "arena"
    return place[0] in ("step", "sample", "score") and len(place) == 2  # other buckets do a missing one's work


def refusal_of(fake: FakeCuda, core: Path, change: Callable[[], object], restore: Callable[[], object]) -> str | None:
    """Why a core is refused with a change, which is taken back then. Nothing may be freed wrongly meanwhile."""
    fake.reset()
    change()
    try:
        found = refusal(core)
    finally:
        restore()
    assert not fake.misfrees()
    return found


@settings(max_examples=250)
@given(data=st.data())
def test_a_graph_file(loaded_fake: FakeCuda, mutated: Path, data: st.DataObject) -> None:
    good = (mutated / GRAPHS).read_bytes()
    plain = msgpack.unpackb(good)
    place, changed = mutate(plain, data.draw)
    written = msgpack.packb(changed)
    assume(written != good)
    change, restore = (partial(forge, mutated, GRAPHS, lambda _, data=data: data) for data in (written, good))
    found = refusal_of(loaded_fake, mutated, change, restore)
    assert found is not None or may_pass(plain, place), place
    assert found is None or found.startswith(GRAPHS), found


@settings(max_examples=250)
@given(data=st.data())
def test_a_manifest(loaded_fake: FakeCuda, mutated: Path, data: st.DataObject) -> None:
    good = (mutated / MANIFEST).read_bytes()
    place, changed = mutate(json.loads(good), data.draw)
    change, restore = (partial(sign, mutated, data) for data in (json.dumps(changed).encode(), good))
    found = refusal_of(loaded_fake, mutated, change, restore)
    assert found is not None or place[0] not in ("format", "version", "limits"), place
