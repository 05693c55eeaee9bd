"""What CudaReplay refuses: the cpu target's refusals in the cpu's words, and what only a device has no room for."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int32
from typing import Any

import pytest

from flare.replay.cpu import CpuArg, CpuReplay
from tests.replay.conftest import Open
from tests.replay.test_cuda import INFINITY, NAN, expected, fill, prepared
from tests.support.fake_library import node, program
from tests.support.tiny_cuda.sizes import CONTEXT, SLOTS, STRIDE, TOKENS, V


def bad_steps() -> list[tuple[str, Callable[[Any], Any]]]:
    """Steps that both targets refuse, of arrays with tokens 1, 2, 3 of slot 0 and 4, 5 of slot 1, and rows 2 and 4."""

    def entry(name: str, index: int, value: int) -> Callable[[Any], Any]:
        def call(replay: Any) -> None:
            getattr(replay, name)[index] = value
            replay.step(5, 2)

        return call

    return [
        ("no tokens", lambda r: r.step(0, 0)),
        ("too many tokens", lambda r: r.step(TOKENS + 1, 0)),
        ("negative tokens", lambda r: r.step(-1, 0)),
        ("more rows than tokens", lambda r: r.step(3, 4)),
        ("more rows than there are", lambda r: r.step(5, 5)),
        ("negative rows", lambda r: r.step(5, -1)),
        ("token", entry("tokens", 2, V)),
        ("negative token", entry("tokens", 4, -1)),
        ("position", entry("positions", 2, CONTEXT)),
        ("negative position", entry("positions", 3, -1)),
        ("position that does not follow", entry("positions", 1, 5)),
        ("slot", entry("slots", 0, SLOTS)),
        ("negative slot", entry("slots", 3, -7)),
        ("slot again", entry("slots", 4, 0)),
        ("page", entry("page_table", 0, 8)),
        ("negative page", entry("page_table", STRIDE, -2)),
        ("row", entry("rows", 1, 5)),
        ("negative row", entry("rows", 0, -1)),
    ]


def bad_rows() -> list[tuple[str, Callable[[Any], Any]]]:
    """Draws and scores that both targets refuse, behind a step that left two rows."""

    def parameter(values: dict[str, Any]) -> Callable[[Any], Any]:
        def call(replay: Any) -> None:
            for name, value in values.items():
                setattr(replay.sampling[1], name, value)
            replay.sample(2)

        return call

    def scored(name: str, value: int) -> Callable[[Any], Any]:
        def call(replay: Any) -> None:
            getattr(replay, name)[1] = value
            replay.score(0, 2)

        return call

    tokens = (c_int32 * 3)(1, 2, V)
    negative = (c_int32 * 3)(1, -2, 3)
    penalised = {"presence": 1.0, "history_len": 3}
    return [
        ("rows to draw", lambda r: r.sample(3)),
        ("negative rows to draw", lambda r: r.sample(-1)),
        ("rows to score", lambda r: r.score(1, 2)),
        ("first row to score", lambda r: r.score(-1, 1)),
        ("negative rows to score", lambda r: r.score(0, -1)),
        ("temperature", parameter({"temperature": NAN})),
        ("infinite temperature", parameter({"temperature": INFINITY})),
        ("top_p", parameter({"top_p": 1.5})),
        ("min_p", parameter({"min_p": -0.5})),
        ("repetition", parameter({"repetition": 0.0})),
        ("presence", parameter({"presence": -INFINITY})),
        ("frequency", parameter({"frequency": NAN})),
        ("top_k", parameter({"top_k": -2})),
        ("prompt_len", parameter({"prompt_len": 4, "history_len": 3})),
        ("negative history_len", parameter({"history_len": -1})),
        ("alternatives", parameter({"alternatives": 21})),
        ("negative alternatives", parameter({"alternatives": -2})),
        ("explicit", parameter({"alternatives": 0, "explicit": 129})),
        ("null history", parameter(penalised)),
        ("history", parameter(penalised | {"history": tokens})),
        ("negative history", parameter(penalised | {"history": negative})),
        ("null explicit", parameter({"alternatives": 0, "explicit": 2})),
        ("explicit ids", parameter({"alternatives": 0, "explicit": 3, "explicit_ids": tokens})),
        ("target", scored("targets", V)),
        ("negative target", scored("targets", -1)),
        ("wanted", scored("wanted", 21)),
        ("negative wanted", scored("wanted", -1)),
    ]


def cpu_replay() -> CpuReplay:
    """A cpu replay with the tiny core's limits."""
    logits = node("Logits<64>", 0, CpuArg("weights", 0, 256), CpuArg("io", 0, 1024))
    return CpuReplay(program([logits], max_context=CONTEXT, max_step_tokens=TOKENS), threads=1, kv_pages=8)


def refusal(replay: Any, call: Callable[[Any], Any], *, stepped: bool) -> str:
    """What a replay says to a call; the library's name, with which the cpu's begins, left out."""
    replay.page_table[0] = replay.page_table[STRIDE] = 1
    n = fill(replay, [(0, 0, [1, 2, 3]), (1, 0, [4, 5])])
    replay.rows[:2] = [2, 4]
    if stepped:
        replay.step(n, 2)
    with pytest.raises(ValueError) as error:
        call(replay)
    text = str(error.value)
    assert "\n" not in text
    return text.partition(".so: ")[2] if isinstance(replay, CpuReplay) else text


@pytest.mark.parametrize("stepped", [False, True], ids=["steps", "rows"])
def test_what_the_cpu_refuses_is_refused_in_the_same_words(open_tiny: Open, executor: Any, stepped: bool) -> None:
    for name, call in bad_rows() if stepped else bad_steps():
        with cpu_replay() as cpu:
            wanted = refusal(cpu, call, stepped=stepped)
        replay = open_tiny()
        executor.launched.clear()
        assert refusal(replay, call, stepped=stepped) == wanted, name
        assert len(executor.launched) == 3 * stepped, name  # the step before, and nothing after
        replay.close()


def test_a_history_longer_than_the_context_is_refused(open_tiny: Open) -> None:
    """The device has no room for it."""
    replay = prepared(open_tiny, [1])
    replay.sampling[0].history_len = CONTEXT + 1
    with pytest.raises(ValueError, match=r"params\[0\]: history_len 65: must be in \[0, 64\]"):
        replay.sample(1)


def test_a_refused_step_leaves_the_page_table_to_the_next(open_tiny: Open) -> None:
    """Slot 0's pages changed in a step that slot 1 spoiled: they are sent with the next one all the same."""
    replay = open_tiny()
    replay.page_table[0] = 1
    replay.page_table[STRIDE] = 99
    n = fill(replay, [(0, 0, [1]), (1, 0, [4])])
    with pytest.raises(ValueError, match="slot 1 has page 99"):
        replay.step(n, 1)
    replay.step(fill(replay, [(0, 0, [1])]), 1)
    assert replay.logits(0).tolist() == expected([1])[0]
