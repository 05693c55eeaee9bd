"""Constraints of every kind, compiled within bounds; what cannot be done is said in our words."""

from __future__ import annotations

import re
from ctypes import addressof, c_uint32
from random import Random
from threading import Thread
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flare.constraints import Constraints, Vocabulary
from flare.constraints import compiled as compiling
from flare.constraints.compiled import KEPT
from flare.conversation import Constraint
from flare.errors import MaskError, RequestError
from flare.grammar import MAX_DEFINITION
from flare.text.tokenizer import Tokenizer
from tests.constraints.driving import STOP, VOCABULARY, allowed, compiled, is_answer, wander, write
from tests.text import samples

PATCH = 'start: "begin\\n" line+ "end"\nline: "+" /[^\\n]*/ "\\n"\n'


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("begin\n+a\nend", True),
        ("begin\n+\u00fc \U0001f642\n+\nend", True),
        ("begin\nend", False),
        ("begin\n+a\nend\n", False),
    ],
)
def test_lark(text: str, fits: bool) -> None:
    assert is_answer(compiled("lark", PATCH).start(None), text) == fits


EXPRESSION = r"(a|b0?)+\n{0,2}"


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet="ab0\n", max_size=8))
def test_regular_expressions_agree_with_pythons(text: str) -> None:
    fits = re.fullmatch(EXPRESSION, text) is not None
    assert is_answer(compiled("regex", EXPRESSION).start(None), text) == fits


@pytest.mark.parametrize(
    "expression", [EXPRESSION, "[a-f]{3,8}", "(yes|no|maybe)( [a-z]+){0,3}", "\u4f60|\u00e9+", "x?"]
)
def test_what_is_drawn_at_random_matches(expression: str) -> None:
    random = Random(2)
    texts = [wander(compiled("regex", expression).start(None), random) for _ in range(15)]
    ended = [text for text in texts if text is not None]
    assert ended and all(re.fullmatch(expression, text.decode()) for text in ended)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (samples.byte_level, "\u4f60\u00fc"),
        (lambda: samples.metaspace("first"), "\u4f60\u00fc"),
        (samples.prepending, "\u4f60\u00fc"),
        (samples.unigram, "fox"),
    ],
)
def test_tokenizers_of_every_kind(make: Any, word: str) -> None:
    """Where tokens begin with a prefix space, or stand for single bytes, the answer's text is the same."""
    base = make()
    stop = base.token_to_id("</s>")
    model = Constraints(Vocabulary(Tokenizer(base, eos_token_ids=[stop]), base.get_vocab_size() + 3, [stop]))
    (form,) = model.compile(Constraint("regex", f"the (quick|lazy) {word}+"))
    mask = form.start(None)
    text, vocabulary = f"the quick {word}".encode(), model.vocabulary
    words = (c_uint32 * vocabulary.words)()
    while text:
        assert mask.fill(addressof(words), vocabulary.words)
        bits = int.from_bytes(bytes(words), "little")
        may = [t for t in vocabulary.leading(text) if bits >> t & 1]
        assert may, text
        mask.accept(may[-1])
        text = text[len(vocabulary.text(may[-1])) :]
    assert mask.fill(addressof(words), vocabulary.words) and int.from_bytes(bytes(words), "little") >> stop & 1


@pytest.mark.parametrize(
    ("kind", "definition", "said"),
    [
        ("lark", "start: nosuch", "f: cannot be compiled as a Lark grammar at line 1, column 8: a name that "),
        ("lark", 'other: "a"', "f: cannot be compiled as a Lark grammar"),
        ("lark", 'start: x\nx: %json {"type": "object"}', "f: %json is not supported in grammars; "),
        ("lark", "start: A\nA: " + " & ".join(f"/a.*b{i}/" for i in range(30)), "f: more than 4 intersections (&)"),
        ("lark", 'start: "' + "&" * 17 + '"', "f: more than 4 intersections (&) or 16 signs of it; "),
        ("regex", "([", "f: cannot be compiled as a regular expression at character 2: a class that is not closed; "),
        ("regex", r"(a)\1", "f: cannot be compiled as a regular expression at character 4: a reference to a group, "),
        (
            "regex",
            "ab\\",
            "f: cannot be compiled as a regular expression at character 3: an escape that ends too soon; ",
        ),
        (
            "regex",
            "a" * (MAX_DEFINITION + 1),
            f"f: {MAX_DEFINITION + 1} bytes of UTF-8, the limit is {MAX_DEFINITION}; ",
        ),
    ],
)
def test_what_cannot_be_compiled(kind: Any, definition: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(kind, definition)
    error = caught.value
    assert str(error).startswith(said) and error.param == "f" and error.status == 400 and len(str(error)) < 200


LISTS = [{"type": "array", "items": {"type": ["string", "array"], "maxLength": i}} for i in range(24)]
NESTED = {"anyOf": [{"type": "array", "minItems": 20, "items": {"anyOf": LISTS[i : i + 12]}} for i in range(12)]}
"""Lists of which it shows late which of 144 they are."""


@pytest.mark.parametrize(
    ("kind", "definition"),
    [
        ("lark", 'start: start start | "a"'),
        ("lark", "start: start start | /[a-z ]/"),
        ("lark", "start: start start start | start start | /[a-z ]/"),
        ("lark", "start: a*\na: b*\nb: c*\nc: /[a-z ]/ | a a"),
        ("lark", "start: x+\nx: /[a-z]+/ | /[a-z ]+/ | x x"),
        ("json_schema", NESTED),
        ("lark", "start: x{1,100000}\nx: /[a-z]/ | /[a-z][a-z]/"),
        ("regex", "[a-z ]*a[a-z ]{200}"),
        ("regex", "(?s:.*a.{30}b.*c.{20})"),
        ("regex", r"(\p{L}|\p{N}){1,1000}\p{Lu}(\w){30}"),
    ],
)
def test_a_step_is_bounded_and_what_takes_more_ends_the_reply(kind: Any, definition: Any) -> None:
    """It takes about 10 ms of the thread's time, here held to ten times that."""
    try:
        mask, random, slowest = compiled(kind, definition).start(None), Random(1), 0.0
    except RequestError as error:
        assert "cannot be compiled" in str(error)
        return
    for _ in range(120):
        started = thread_time()
        try:
            may = allowed(mask)
        except MaskError as error:
            assert "became too complex" in str(error)
            break
        finally:
            slowest = max(slowest, thread_time() - started)
        assert may
        if may <= VOCABULARY.stops:
            break
        try:
            mask.accept(random.choice(sorted(may - VOCABULARY.stops)))
        except MaskError as error:
            assert "became too complex" in str(error)
            break
    assert slowest < 0.1


def test_a_constraint_is_translated_once_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    translated: list[Any] = []
    translate = compiling._translated
    monkeypatch.setattr(compiling, "_translated", lambda form: translated.append(form) or translate(form))
    schema = {"type": "object"}
    model, form = Constraints(VOCABULARY), Constraint("json_schema", schema, "a", enforced=schema)
    assert len(model.compile(form, 3)) == 3 and len(translated) == 1
    model.compile(Constraint("json_schema", schema, "b", enforced=schema))
    assert len(translated) == 1
    for number in range(KEPT):
        model.compile(Constraint("regex", f"a{number}", "b"))
    model.compile(form)
    assert len(translated) == KEPT + 2


def test_a_reply_that_meets_a_limit_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what comes later nor what has begun, of the same request or another, notices: not in what it may write either."""
    monkeypatch.setitem(compiling._LIMITS, "max_lexer_states", 300)
    model, form = Constraints(VOCABULARY), Constraint("regex", "(a|b)*a(a|b){18}", "f")
    (begun,) = model.compile(form)
    bad, beside, fresh = model.compile(form, 3)
    lives, random = [begun.start(None), beside.start(None)], Random(3)
    assert all(write(mask, "abab") for mask in lives)
    expected = allowed(lives[0])
    with pytest.raises(MaskError, match="became too complex"):
        write(bad.start(None), "".join(random.choice("ab") for _ in range(1000)))
    (later,) = model.compile(form)
    lives += [fresh.start(None), later.start(None)]
    assert all(write(mask, "abab") for mask in lives[2:])
    for mask in lives:
        assert allowed(mask) == expected and is_answer(mask, "b" * 5 + "a" * 19)


def test_replies_do_not_add_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiling._LIMITS, "max_lexer_states", 300)
    model, random = Constraints(VOCABULARY), Random(3)
    for form in model.compile(Constraint("regex", "(a|b)*a(a|b){18}", "f"), 20):
        assert is_answer(form.start(None), "".join(random.choice("ab") for _ in range(100)) + "a" * 19)


def test_tables_are_made_once_by_threads_at_the_same_time() -> None:
    base = samples.byte_level()
    vocabulary = Vocabulary(Tokenizer(base), base.get_vocab_size(), [base.token_to_id("</s>")])
    found: list[Any] = []
    threads = [Thread(target=lambda: found.append(vocabulary.native)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(tables is found[0] for tables in found)
    assert {"unstopped", "breaks", "_by_text", "_ordered"} <= vars(vocabulary).keys(), "no mask has to make them"


def test_tables_give_every_token_by_its_text() -> None:
    """Those of several tokens with one text too, and in the order of texts; against a search through all of them."""
    base = samples.byte_level()
    tokenizer = Tokenizer(base)
    stop = base.token_to_id("</s>")
    spelled = frozenset((base.token_to_id("[INST]"),))
    vocabulary = Vocabulary(tokenizer, base.get_vocab_size() + 3, [stop], spelled)
    texts = {token: vocabulary.text(token) for token in range(vocabulary.size)}
    doubled = [text for text in texts.values() if text and list(texts.values()).count(text) > 1]
    assert doubled, "runs of spaces are added tokens and the model's own"
    for text in {*texts.values(), b"[INST]", b"th", b"\xf0", b"  "}:
        starts = [token for token, whole in texts.items() if whole and text.startswith(whole)]
        assert sorted(vocabulary.leading(text)) == starts
        goes_on = sorted((whole, token) for token, whole in texts.items() if whole.startswith(text) and whole != text)
        assert list(vocabulary.beyond(text)) == [token for _, token in goes_on]
    assert sorted(vocabulary.breaks) == [token for token, whole in texts.items() if whole and set(whole) == {10}]


def test_a_model_without_an_end_has_no_answers_of_a_form() -> None:
    base = samples.byte_level()
    with pytest.raises(RequestError, match="f: this model has no token that ends a reply"):
        Constraints(Vocabulary(Tokenizer(base), base.get_vocab_size(), [])).compile(
            Constraint("json_object", None, "f")
        )


def test_a_text_that_the_model_has_no_tokens_for() -> None:
    base = samples.unigram()
    stop = base.token_to_id("</s>")
    model = Constraints(Vocabulary(Tokenizer(base, eos_token_ids=[stop]), base.get_vocab_size(), [stop]))
    mask = model.compile(Constraint("regex", "[fx]o\u4f60", "f"))[0].start(None)
    words = (c_uint32 * model.vocabulary.words)()
    with pytest.raises(MaskError, match="no token of this model leads on"):
        for text in (b"f", b"o", b"?"):
            mask.fill(addressof(words), model.vocabulary.words)
            mask.accept(max(model.vocabulary.leading(text)))


def test_masks_know_no_token_beyond_the_vocabulary() -> None:
    may = allowed(compiled("regex", "(?s:.*)").start(None))
    assert may and max(may) < VOCABULARY.size and STOP in may
    assert not may & (VOCABULARY.hidden - VOCABULARY.stops)
