"""What the exporter finds out about the model families' templates: all that is known of each."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models

from flare.conversation import Message
from flare.prompting import template_messages
from flare.tables import check_facts
from flare.text.template import ChatTemplate
from ignition.text_facts import _template_facts
from tests.text import families
from tests.text.families.known import CONTROLS, KNOWN


def tokenizer_json(family: str) -> bytes:
    """Ids count from 1: first the special tokens, then the added ones."""
    made = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    special, added = CONTROLS[family]
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.split()])
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added.split()])
    return made.to_str().encode()


def spellings(family: str, ids: list[int]) -> str:
    known = " ".join(CONTROLS[family]).split()
    return " ".join(known[id - 1] for id in ids)


@cache
def facts(family: str) -> dict[str, Any]:
    special = families.SPECIAL.get(family, {})
    found = _template_facts(families.source(family), "chat_template.jinja", special, tokenizer_json(family))
    assert json.loads(json.dumps(found)) == found
    check_facts(found, 100)
    return found


def test_every_family_is_known() -> None:
    assert KNOWN.keys() == set(families.FAMILIES) == CONTROLS.keys()


@pytest.mark.parametrize("family", KNOWN)
def test_thinking_levels(family: str) -> None:
    known = KNOWN[family]
    assert facts(family)["thinking"] == {
        "supported": bool(known.levels),
        "source": "chat_template.jinja",
        "toggle": known.toggle,
        "effort": known.effort,
        "default_level": known.default,
        "levels": [
            {
                "id": level.id,
                "enable_thinking": level.switch,
                "reasoning_effort": level.effort,
                "instruction": level.instruction,
                "opens_reasoning": level.opens,
                "default": level.id == known.default,
            }
            for level in known.levels
        ],
    }


@pytest.mark.parametrize("family", KNOWN)
def test_the_beginning_of_a_reply(family: str) -> None:
    known = KNOWN[family]
    assert facts(family)["generation_prompts"] == {
        "": known.opening + known.unnamed,
        **{level.id: known.opening + level.prompt for level in known.levels},
    }
    assert facts(family)["opens_reasoning"] == known.opens
    assert facts(family)["generation_prompt_switch"] == bool(known.opening)


@pytest.mark.parametrize("family", KNOWN)
def test_roles_continuation_and_forms(family: str) -> None:
    known, found = KNOWN[family], facts(family)
    assert found["system"] == {"leading": known.leading, "inline": known.inline, "default": known.system}
    assert found["inline_system"] == (known.inline == "renders")
    assert found["developer"] == known.developer
    assert found["continuation"] == {"supported": True, "tail": known.tail, "trims": known.trims}
    assert found["tools"] == {"declared": True, "calls": True, "results": True, "arguments": "mapping"}
    assert found["content"] == {"string": True, "parts": known.parts}
    assert found["variables"] == known.variables.split()


@pytest.mark.parametrize("family", KNOWN)
def test_what_a_model_writes(family: str) -> None:
    known, found = KNOWN[family], facts(family)["output"]
    assert found["tools"] == known.format
    assert found["reasoning"] == (None if known.reasoning is None else list(known.reasoning))
    single = [spellings(family, [id]) if id else None for id in (found["open_token"], found["close_token"])]
    assert single == [None, None] if known.reasoning is None else single == list(known.single)
    assert spellings(family, found["spelled"]) == known.spelled


@pytest.mark.parametrize("family", KNOWN)
def test_a_final_assistant_message_is_continued_where_its_text_ends(family: str) -> None:
    template = ChatTemplate(families.source(family), special_tokens=families.SPECIAL.get(family, {}))
    messages = [Message("user", "Count."), Message("assistant", "One, two,")]
    rendered = template.render(
        template_messages(messages, inline_system=facts(family)["inline_system"]), add_generation_prompt=False
    )
    assert rendered.endswith("One, two," + KNOWN[family].tail)
