"""Text against the tokenizers library and Python's own decoder, one token at a time."""

from __future__ import annotations

import itertools
import time
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flare.text.detokenizer import Detokenizer
from flare.text.tokenizer import Tokenizer
from tests.text import samples

KINDS = sorted(samples.ALL)
FFFD = "\ufffd"


@cache
def token_of(tokenizer: Tokenizer, data: bytes) -> int:
    return samples.token_table(tokenizer).index(data)


@cache
def could_become_a_character(data: bytes) -> bool:
    """Whether some bytes behind these make a character of them, found by trying."""
    for extra in range(1, 4):
        for more in itertools.product([0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF], repeat=extra):
            try:
                if len((data + bytes(more)).decode()) == 1:
                    return True
            except UnicodeDecodeError:
                pass
    return False


def certain_text(data: bytes) -> str:
    """The text of these bytes without the end that could still become a character."""
    for length in (3, 2, 1):
        if len(data) >= length and could_become_a_character(data[-length:]):
            return data[:-length].decode("utf-8", "replace")
    return data.decode("utf-8", "replace")


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=8))
@settings(max_examples=120)
@example([b"Hi ", b"\xf0\x9f", b"\x98\x8a", b"\xe4\xbd", b"\xa0", b"!"])
@example([b"\xe4", b"abc", b" d"])
@example([b"\xf0\x80"])
@example([b"\xed\xa0", b"\x80"])
@example([b"\xf4\x90"])
def test_what_is_certain_comes_at_once_and_nothing_else(pieces: list[bytes]) -> None:
    tokenizer = samples.wrapped("byte_level")
    detokenizer = Detokenizer(tokenizer)
    said, data = "", b""
    for piece in pieces:
        for byte in piece:
            said += detokenizer.push(token_of(tokenizer, bytes([byte])))
            data += bytes([byte])
            assert said == certain_text(data)
    assert said + detokenizer.flush() == data.decode("utf-8", "replace")


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=40)
def test_pieces_add_up_to_the_librarys_text(kind: str, data: st.DataObject) -> None:
    base = samples.ALL[kind]()
    tokenizer = samples.wrapped(kind)
    text = data.draw(
        st.lists(st.sampled_from(["The fox", " a", "  ", "😀", "é 你", "\n\n", "<tool_call>", "☃", " "]), max_size=8)
    )
    ids = base.encode("".join(text), add_special_tokens=False).ids
    detokenizer = Detokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in ids]
    assert "".join(pieces) + detokenizer.flush() == base.decode(ids, skip_special_tokens=True)
    assert not any(FFFD in piece for piece in pieces)


def test_published_case_of_characters_over_two_tokens() -> None:
    tokenizer = samples.wrapped("byte_level")
    pieces = [[72, 105, 32], [240, 159], [152, 138], [228, 189], [160], [33]]
    detokenizer = Detokenizer(tokenizer)
    deltas = ["".join(detokenizer.push(token_of(tokenizer, bytes([b]))) for b in piece) for piece in pieces]
    assert deltas == ["Hi ", "", "😊", "", "你", "!"]
    assert detokenizer.flush() == ""


def test_an_incomplete_character_at_the_end_is_told() -> None:
    tokenizer = samples.wrapped("byte_level")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(token_of(tokenizer, b"\xf0")) == ""
    assert detokenizer.flush() == FFFD
    assert detokenizer.flush() == ""
    assert detokenizer.push(token_of(tokenizer, b"a")) == "a"


def test_a_genuine_replacement_character_passes() -> None:
    tokenizer = samples.wrapped("byte_level")
    detokenizer = Detokenizer(tokenizer)
    ids = [token_of(tokenizer, bytes([b])) for b in "x\ufffdy".encode()]
    assert "".join(map(detokenizer.push, ids)) == "x\ufffdy"


def test_special_tokens_give_no_text_and_end_a_character() -> None:
    tokenizer = samples.wrapped("byte_level")
    special, tag = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<tool_call>")
    detokenizer = Detokenizer(tokenizer)
    ids = [token_of(tokenizer, b"\xe4"), special, token_of(tokenizer, b"\xbd"), tag, 10**7]
    assert [detokenizer.push(i) for i in ids] == ["", FFFD, FFFD, "<tool_call>", ""]
    spelled = Detokenizer(tokenizer, hidden=frozenset())
    assert [spelled.push(i) for i in (special, tag)] == ["<|im_end|>", "<tool_call>"]
    chosen = Detokenizer(tokenizer, hidden=tokenizer.special_ids - {special})
    assert [chosen.push(i) for i in (ids[0], special, tag)] == ["", FFFD + "<|im_end|>", "<tool_call>"]
    assert Detokenizer(tokenizer).push(special) == ""


@pytest.mark.parametrize(
    ("kind", "previous", "expected"),
    [
        ("metaspace_always", None, "fox"),
        ("metaspace_always", "<s>", "fox"),
        ("metaspace_always", "text", " fox"),
        ("metaspace_first", None, "fox"),
        ("metaspace_first", "<s>", " fox"),
        ("metaspace_first", "text", " fox"),
        ("metaspace_never", None, " fox"),
        ("prepending", None, "fox"),
        ("prepending", "<s>", "fox"),
        ("prepending", "text", " fox"),
        ("byte_level", None, " fox"),
    ],
)
def test_a_space_that_encoding_would_add_is_dropped_once(kind: str, previous: str | None, expected: str) -> None:
    tokenizer = samples.wrapped(kind)
    before = None if previous is None else tokenizer.encode("<s>" if previous == "<s>" else "lazy", special=True)[-1]
    detokenizer = Detokenizer(tokenizer, previous=before)
    space = next(i for i, data in enumerate(samples.token_table(tokenizer)) if data == b" ")
    rest = [token_of(tokenizer, data) for data in (b"f", b"o", b"x")]
    assert "".join(detokenizer.push(i) for i in [space, *rest]) == expected
    assert detokenizer.push(space) == " "


def test_time_is_linear_and_text_flows() -> None:
    """Decoding the whole text again at every token would take minutes."""
    tokenizer = samples.wrapped("byte_level")
    detokenizer = Detokenizer(tokenizer)
    stray = [token_of(tokenizer, b"\xe4"), token_of(tokenizer, b"\x80")] * 50_000
    started = time.process_time()
    said = [detokenizer.push(i) for i in [*stray, stray[0]]]
    assert time.process_time() - started < 3
    assert said[:4] == ["", "", FFFD, ""]
    assert "".join(said) + detokenizer.flush() == FFFD * 50_001
