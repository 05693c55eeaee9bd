"""Stop strings against a search over the whole text, however the text is cut."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.text.stops import StopMatcher, StopSet

WORDS = st.text(alphabet="abc", min_size=1, max_size=5)


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(StopSet(stops))
    said, matched = [], None
    for piece in pieces:
        visible, matched = matcher.push(piece)
        said.append(visible)
        if matched is not None:
            break
    return [*said, matcher.flush()], matched


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    """The first end of a match, by trying every end and every stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(st.lists(WORDS, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=8))
@settings(max_examples=200)
@example(["abcd", "bc"], ["ab", "cd"])
@example(["b", "ab"], ["ab"])
@example(["aab"], ["aa", "ab"])
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], pieces: list[str]) -> None:
    expected = reference(stops, "".join(pieces))
    said, matched = run(stops, pieces)
    assert ("".join(said), matched) == expected
    characters, matched = run(stops, list("".join(pieces)))
    assert ("".join(characters), matched) == expected


@given(st.lists(WORDS, min_size=1, max_size=4), st.text(alphabet="abc", max_size=12))
@settings(max_examples=200)
def test_only_the_beginning_of_a_stop_is_held_back(stops: list[str], text: str) -> None:
    matcher = StopMatcher(StopSet(stops))
    visible, matched = matcher.push(text)
    if matched is not None:
        return
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
    longest = next(text[n:] for n in range(len(text) + 1) if text[n:] in beginnings)
    assert visible == text.removesuffix(longest) if longest else visible == text
    assert matcher.flush() == longest


@pytest.mark.parametrize(
    ("stops", "pieces", "deltas", "matched"),
    [
        (["own fox"], ["The quick br", "own", " fo", "x jumps", " over"], ["The quick br", "", "", ""], "own fox"),
        (["STOPNOW"], ["please ", "ST"], ["please ", ""], None),
        (["assist|"], ["say '", "ple", "as"], ["say '", "ple", ""], None),
    ],
)
def test_published_cases(stops: list[str], pieces: list[str], deltas: list[str], matched: str | None) -> None:
    said, found = run(stops, pieces)
    assert said[:-1] == deltas
    assert found == matched
    assert "".join(said) == ("".join(pieces) if matched is None else "".join(pieces).split(matched)[0])


@given(st.lists(WORDS, min_size=1, max_size=4), st.lists(st.text(alphabet="abc", max_size=6), max_size=8))
@settings(max_examples=100)
def test_tokens_are_matched_as_characters_are(stops: list[str], pieces: list[str]) -> None:
    said, matched = run(stops, pieces)
    matcher = StopMatcher(StopSet([tuple(stop.encode()) for stop in stops]))
    shown: list[tuple[int, ...]] = []
    found = None
    for piece in pieces[: len(said) - 1]:
        certain, found = matcher.push(tuple(piece.encode()))
        shown.append(certain)
    assert [*shown, matcher.flush()] == [tuple(text.encode()) for text in said]
    assert found == (None if matched is None else tuple(matched.encode()))


def test_nothing_is_said_after_a_match() -> None:
    matcher = StopMatcher(StopSet(["x"]))
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.push("x") == ("", "x")
    assert matcher.flush() == ""
    assert matcher.matched == "x"


def test_without_stops_all_text_passes() -> None:
    assert run([], ["a", "", "b"]) == (["a", "", "b", ""], None)


@pytest.mark.parametrize("stops", [["a" * 1023 + "b"] * 4, ["a" * n + "b" for n in (1000, 1010, 1020, 1066)]])
@pytest.mark.parametrize("piece", ["a", "aac", "a" * 999 + "c"])
def test_repeats_take_linear_time(stops: list[str], piece: str) -> None:
    """Starting over at every character would take a thousand times as long."""
    matcher = StopMatcher(StopSet(stops))
    count = 200_000 // len(piece)
    started = time.process_time()
    said = sum(len(matcher.push(piece)[0]) for _ in range(count))
    assert time.process_time() - started < 3
    assert said + len(matcher.flush()) == count * len(piece)
