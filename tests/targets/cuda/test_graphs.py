"""Which edges of a graph are programmatic: those of chains, where the architecture has such edges."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from flare.core.architectures import ABILITIES
from flare.core.cuda_graph import Bucket
from ignition.targets.cuda.graphs import make_graphs, place
from ignition.targets.cuda.kernels.elementwise import add_launch
from ignition.targets.cuda.operands import Buffer, at
from ignition.targets.cuda.works import Lowered, Work
from tests.support.checkpoints import make_checkpoint
from tests.support.cuda_exports import LIMITS, export_cuda, uncompiled


def work(out: Buffer, *sources: Buffer, launches: int = 1) -> Work:
    """A sum of buffers, by so many launches that follow each other."""
    one = add_launch(at(sources[0]), at(sources[-1]), at(out), elements=16, label="sum")
    reads, writes = (frozenset(f"%{buffer.id}" for buffer in some) for some in (sources, [out]))
    return Work("sum", lambda tokens, rows: [one] * launches, reads, writes, None)


def edges(bucket: Bucket) -> list[list[tuple[int, bool]]]:
    return [[(edge.node, edge.programmatic) for edge in node.after] for node in bucket.nodes]


def test_an_edge_is_programmatic_where_it_is_the_only_one_of_two_kernels() -> None:
    """Behind a copy: a, b, then c beside d (a fork), e (a join), and f, of two launches."""
    start, a, b, c, d, e, f = buffers = [Buffer(number, "T", 16, "f32") for number in range(7)]
    works = [work(a, start), work(b, a), work(c, b), work(d, b), work(e, c, d), work(f, e, launches=2)]
    lowered = Lowered(works, buffers, 64, {}, set())
    made = uncompiled(SimpleNamespace(lowered={"sm_90a": lowered}, limits=LIMITS, vocabulary=40))
    graphs = make_graphs("sm_90a", lowered, place(lowered, LIMITS, 40), {}, made, LIMITS, 40)
    chain = [[(0, False)], [(1, True)], [(2, False)], [(2, False)], [(3, False), (4, False)], [(5, True)], [(6, True)]]
    assert edges(graphs.step[0]) == edges(graphs.step[-1]) == [[], *chain]


@pytest.mark.parametrize("architecture", ABILITIES)
def test_the_chains_of_a_model_are_programmatic_from_compute_capability_9_on(architecture: str, tmp_path: Path) -> None:
    """All of a step but the copy's edges and the join behind embedding and angles; of a draw, all but those of its copies."""
    checkpoint = make_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    graphs = export_cuda(checkpoint, architectures=(architecture,)).graphs(architecture)
    there = int(architecture.strip("sm_a")) >= 90
    for kind, full in (("step", {1, 2, 3}), ("sample", {8, 9}), ("score", set())):
        for bucket in getattr(graphs, kind):
            for number, after in enumerate(edges(bucket)):
                assert [programmatic for _, programmatic in after] == [there and number not in full] * len(after)
