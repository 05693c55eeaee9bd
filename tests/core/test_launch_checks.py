"""Every planted defect of launches that do not go together is refused by name, in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cuda_graphs import make_graphs
from tests.support.graph_defects import (
    ARCHITECTURE,
    DOT,
    FILL,
    SCALE,
    WHERE,
    Change,
    changed,
    node,
    pointer,
    put,
    refused,
    scalar,
)


def named(old: str, new: str, *values: int) -> Change:
    """Renames a parameter of the scaling; values: what its argument 2 is then in a step's first and second bucket."""

    def change(g: dict[str, Any]) -> None:
        g["kernels"][0]["signature"] = {new if k == old else k: v for k, v in g["kernels"][0]["signature"].items()}
        for bucket, value in enumerate(values):
            arg_of = g["step"][bucket]["nodes"][6]["args"]
            arg_of[2] = scalar("i32", value)

    return change


DEFECTS: list[tuple[Change, str]] = [
    (put(1, pointer("io", 320, 256)), f"{SCALE}: argument 1 (y): 256 bytes of logits, wanted 320"),
    (put(1, pointer("io", 384, 64)), "argument 1 (y): byte 384 of segment io, wanted the place of one of logits, page_table"),
    (lambda g: put(1, g["io"]["history"])(g), "argument 1 (y): the place of history, wanted one of logits, page_table"),
    (lambda g: put(1, g["io"]["slots"])(g), "step[1]: no kernel of it is given logits"),
    (named("x", "positions"),
     "step[0] node 6 ('scale'): argument 0 (positions): byte 0 of segment arena, wanted the place of positions"),
    (named("y", "rows"), "step[0] node 6 ('scale'): argument 1 (rows): the place of logits, wanted that of rows"),
    (named("n", "tokens", 1, 2), "step[1]: its launches are for 2 tokens, wanted 4 in one of them"),
    (named("n", "tokens", 1, 3), f"{SCALE}: argument 2 (tokens): 3, wanted 4 or 2 by the bucket's sizes"),
    (lambda g: g["score"][0]["nodes"].clear(), "score[0]: no kernel of it is given logprobs"),
    (lambda g: node(g, 0, "sample")["args"].__setitem__(1, g["io"]["params"]), "sample[1]: no kernel of it is given sampled"),
    (lambda g: node(g, 0, "sample")["args"].__setitem__(1, g["io"]["tokens"]),
     "sample[1] node 0 ('draw'): argument 1 (b): the place of tokens, wanted one of explicit_ids, history, logits, logprobs"),
    (lambda g: node(g, 0, "sample")["args"].__setitem__(1, pointer("weights", 0, 64)),
     "sample[1] node 0 ('draw'): argument 1 (b): a place in segment weights, which steps alone use"),
    (lambda g: node(g, 6).update(grid=[4096, 1, 1]),
     f"{SCALE}: its grid has 4096 blocks, more than its arguments have bytes, 640"),
    (lambda g: node(g, 6).update(grid=[65535, 65535, 1]), f"{SCALE}: its grid has 4294836225 blocks"),
    (lambda g: node(g, 6).update(grid=[5, 1, 1]), f"{SCALE}: its grid has 5 blocks, wanted 1 to 4 by the 1 of the bucket of 1"),
    (put(0, pointer("arena", 64, 320)), f"{SCALE}: argument 0 (x): 64, wanted 0, as in the bucket of 1"),
    (put(0, pointer("weights", 64, 320)), f"{SCALE}: argument 0 (x): no place in the arena, wanted 0, as in the bucket of 1"),
    (put(3, scalar("f32", 0.25)), f"{SCALE}: argument 3 (factor): 0.25, wanted 0.5, as in the bucket of 1"),
    (lambda g: [each["nodes"][6]["args"][0].update(offset=64) for each in g["step"]],
     "step[0] node 6 ('scale'): it alone names byte 64 of the arena"),
    (lambda g: node(g, 4)["target"].update(offset=128), f"{FILL}: it alone names byte 128 of the arena"),
    (put(0, pointer("weights", 64, 8192), 5),
     f"{DOT}: it is the first to use a, bytes 64..8256 of weights, where {WHERE}: step[0] uses a, bytes 0..8192 of weights"),
    (put(1, pointer("kv", 64, 64), 5),
     f"{DOT}: it is the first to use b, bytes 64..128 of kv, where {WHERE}: step[0] uses b, bytes 0"),
    (lambda g: node(g, 6).update(label="other") or put(0, pointer("weights", 0, 64))(g),
     f"step[1]: it uses 3 places of weights and pages, {WHERE}: step[0] uses 2"),
    (lambda g: node(g, 6).update(after=[{"node": 3}]), f"{DOT}: no node waits for it, and node 6 ends the graph"),
    (lambda g: node(g, 5).update(after=[{"node": 3}]), f"{FILL}: no node waits for it, and node 6 ends the graph"),
    (lambda g: g["score"][0]["nodes"].append(node(g, 0, "score", 0)),
     "score[0] node 0 ('scale'): no node waits for it, and node 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), DEFECTS)
def test_planted_defects(cubins: Path, change: Change, says: str) -> None:
    graphs, files = make_graphs(cubins, ARCHITECTURE)
    assert says in refused(changed(graphs, change), files)
