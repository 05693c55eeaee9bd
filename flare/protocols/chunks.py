"""The stream of Chat Completions and Completions: events to chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from flare.conversation import Called, Event, Failed, Finished, Logprobed, Observed, Reasoning, Scored, Text
from flare.logprobs import TokenLogprobs
from flare.protocols.encoding import (
    Observations,
    call_object,
    ending_members,
    error_object,
    finish_reason,
    total_usage,
    usage_object,
)
from flare.protocols.endpoint import Response, encode_json
from flare.protocols.logprob_encoding import Columns, entry_list

DONE = b"data: [DONE]\n\n"
NO_LOGPROBS, NO_FINISH = b',"logprobs":null', b',"finish_reason":null'


def frame(value: Any) -> bytes:
    """Returns one SSE data frame."""
    return b"data: " + encode_json(value) + b"\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkFormat:
    """How an endpoint's chunks look.

    `text`, `reasoning` and `call` begin the member of a choice that holds a string or a call, `close` ends each of them.
    `role` and `nothing` are the members of a choice without text (no `role`: there is no such chunk). `chat`: reasoning
    is counted; the tokens of the prompt stand in the first chunk, not in each choice's first; and the last chunk has
    the usage where token ids are shown and usage has no chunk of its own.
    """

    object: str
    text: bytes
    close: bytes
    nothing: Mapping[str, Any]
    chat: bool
    role: Mapping[str, Any] | None = None
    reasoning: bytes = b""
    call: bytes = b""


class EntryLists:
    """Log probabilities of the choices of Chat Completions that have come since their last chunks."""

    def __init__(self, response: Response) -> None:
        self._spelling = response.spelling
        self._entries: dict[int, list[TokenLogprobs]] = {}

    def add(self, event: Logprobed) -> None:
        self._entries.setdefault(event.choice, []).extend(event.entries)

    def add_prompt(self, event: Scored) -> None:
        """A stream does not show them."""

    def due(self, choice: int) -> bool:
        """Whether a choice has some to be taken."""
        return choice in self._entries

    def end(self, choice: int) -> None:
        """Nothing comes for a choice any more."""

    def take(self, choice: int) -> dict[str, Any] | None:
        """Returns the `logprobs` of the choice's next chunk."""
        entries = self._entries.pop(choice, None)
        return None if entries is None else {"content": entry_list(self._spelling, entries)}


class PromptColumns:
    """The log probabilities of an echoed prompt, whose choices all show them: what comes at once is encoded once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._entries: Sequence[TokenLogprobs] | None = None
        self._encoded = msgspec.Raw()

    def encoded(self, entries: Sequence[TokenLogprobs]) -> msgspec.Raw:
        """Returns the prompt's next arrays. The same object again is the same part, for another choice."""
        if entries is not self._entries:
            self._entries = entries
            self._columns.add_prompt(entries)
            self._encoded = msgspec.Raw(encode_json(self._columns.take()))
        return self._encoded


class ColumnLists:
    """As `EntryLists`, for Completions: those of an echoed prompt come before the choice's own, in chunks of their own."""

    def __init__(self, response: Response) -> None:
        generation = response.decoded.generation
        choices = range(generation.n * len(generation.prompts) if generation.logprobs is not None else 0)
        self._n = generation.n
        self._columns = [columns_of(response, choice) for choice in choices]
        self._prompts = [PromptColumns(columns_of(response, first)) for first in choices[:: self._n]]
        self._parts: dict[int, msgspec.Raw] = {}

    def add(self, event: Logprobed) -> None:
        self._columns[event.choice].add(event.entries, event.offsets)

    def add_prompt(self, event: Scored) -> None:
        self._columns[event.choice].leave_out_prompt()
        self._parts[event.choice] = self._prompts[event.choice // self._n].encoded(event.entries)

    def due(self, choice: int) -> bool:
        return choice in self._parts or (bool(self._columns) and bool(self._columns[choice]))

    def end(self, choice: int) -> None:
        if self._columns:
            self._columns[choice].begin()

    def take(self, choice: int) -> Any:
        part = self._parts.pop(choice, None)
        if part is not None:
            return part
        return self._columns[choice].take() if self.due(choice) else None


def columns_of(response: Response, choice: int) -> Columns:
    """Returns the empty columns of a choice that has log probabilities."""
    generation = response.decoded.generation
    place = choice // generation.n
    echoed = response.echoed[place] if response.decoded.echo else None
    assert generation.logprobs is not None
    return Columns(response.spelling, response.prompts[place], echoed, generation.logprobs.alternatives)


class ChunkEncoder:
    """Events to the chunks of a Chat Completions or Completions stream.

    What does not change between the chunks of a choice is encoded once; a token costs one escaped string and two joins.
    Observed tokens and log probabilities go with the next chunk of their choice; an event that shows nothing else makes a
    chunk for them. Those of an echoed prompt have chunks of their own.
    """

    def __init__(self, response: Response, format: ChunkFormat, logprobs: EntryLists | ColumnLists) -> None:
        decoded = response.decoded
        self.response = response
        self.format = format
        self.logprobs = logprobs
        self.shows: Observations = decoded.details
        self.include_usage = decoded.include_usage
        self.continuous = decoded.include_usage and decoded.continuous_usage
        self.n = decoded.generation.n
        choices = self.n * len(decoded.generation.prompts)
        self.ends: list[Finished | None] = [None] * choices
        self.begun = [False] * choices
        self.prompt_due = [self.shows.ids and not format.chat] * choices
        self.prompt_ids: dict[int, msgspec.Raw] = {}  # by the prompt's place: its choices all show them
        self.calls = [0] * choices
        self.observed: list[tuple[list[int], list[float]]] = [([], []) for _ in range(choices)]
        self.open = choices
        self.ended = False
        self.counted = 0
        self.reasoned = 0
        self.cached = [0] * len(decoded.generation.prompts)
        self.envelope: dict[str, Any] = {
            "id": response.id,
            "object": format.object,
            "created": response.created,
            "model": response.model.id,
            "system_fingerprint": response.model.fingerprint,
        }
        before = b"data: " + encode_json(self.envelope)[:-1] + b',"choices":[{"index":'
        self.heads = [b"%b%d," % (before, index) for index in range(choices)]
        self.texts = [head + format.text for head in self.heads]
        self.reasonings = [head + format.reasoning for head in self.heads]
        tail = format.close + NO_LOGPROBS + NO_FINISH + b"}]"
        tail += b',"usage":null}\n\n' if self.include_usage else b"}\n\n"
        varies = self.continuous or self.shows or decoded.generation.logprobs is not None
        self.tail: bytes | None = None if varies else tail

    def encode(self, event: Event) -> bytes:
        """Returns the frames of one event; empty when it shows nothing."""
        if type(event) is Text:
            return self._piece(event, self.texts)
        if type(event) is Reasoning:
            self.reasoned += event.tokens
            return self._piece(event, self.reasonings)
        if type(event) is Called:
            return self._call(event)
        if type(event) is Observed:
            ids, times = self.observed[event.choice]
            ids += event.ids
            times += [event.at] * len(event.ids)
            return b""
        if type(event) is Finished:
            return self._finish(event)
        if type(event) is Logprobed:
            self.logprobs.add(event)
            return b""
        if type(event) is Scored:
            self.logprobs.add_prompt(event)
            return self._nothing(event.choice)
        assert type(event) is Failed
        self.ended = True
        return frame(error_object(event.error))

    def _piece(self, event: Text | Reasoning, heads: list[bytes]) -> bytes:
        index = event.choice
        begin = self._count(event)
        if event.text:
            return begin + heads[index] + encode_json(event.text) + (self.tail or self._tail(index))
        if self.observed[index][0] or self.logprobs.due(index):
            return begin + self._nothing(index)
        return begin

    def _nothing(self, index: int) -> bytes:
        """Returns a chunk without text."""
        return self._chunk({"index": index, **self.format.nothing, "logprobs": None, "finish_reason": None})

    def _call(self, event: Called) -> bytes:
        index = event.choice
        begin = self._count(event)
        call = {"index": self.calls[index], **call_object(event.call)}
        self.calls[index] += 1
        head = self.heads[index] + self.format.call
        return begin + head + encode_json(call) + b"]" + (self.tail or self._tail(index))

    def _finish(self, event: Finished) -> bytes:
        index = event.choice
        frames = self._count(event)
        self.ends[index] = event
        self.open -= 1
        self.logprobs.end(index)
        if event.text:
            frames += self.texts[index] + encode_json(event.text) + (self.tail or self._tail(index))
        choice = {
            "index": index,
            **self.format.nothing,
            "logprobs": None,
            "finish_reason": finish_reason(event),
            "stop_reason": event.cause,
        }
        more = ending_members([event], self.response.model)
        ends = [end for end in self.ends if end is not None]
        if not self.open and self.format.chat and self.shows.ids and not self.include_usage:
            more["usage"] = total_usage(ends, self.n, chat=True)
        frames += self._chunk(choice, more)
        if self.open:
            return frames
        self.ended = True
        if self.include_usage:
            usage = total_usage(ends, self.n, chat=self.format.chat)
            frames += frame({**self.envelope, "choices": [], "usage": usage})
        return frames + DONE

    def _count(self, event: Text | Reasoning | Called | Finished) -> bytes:
        """Takes an event's counts; returns the chunk that says who speaks, if it is the choice's first."""
        index = event.choice
        self.counted += event.tokens
        if index % self.n == 0:  # a prompt's first choice says what of the prompt came from a cache
            self.cached[index // self.n] = event.cached_tokens
        if self.begun[index] or self.format.role is None:
            return b""
        first = not any(self.begun)
        self.begun[index] = True
        more = {"prompt_token_ids": self.response.prompts[0]} if first and self.shows.ids else {}
        choice = {"index": index, **self.format.role, "logprobs": None, "finish_reason": None}
        return self._frame(choice, more)

    def _chunk(self, choice: dict[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        """Returns a chunk with what was observed."""
        index = choice["index"]
        return self._frame({**choice, "logprobs": self.logprobs.take(index), **self._observations(index)}, more or {})

    def _frame(self, choice: Mapping[str, Any], more: Mapping[str, Any]) -> bytes:
        chunk = {**self.envelope, "choices": [choice], **more}
        if self.include_usage:
            chunk["usage"] = self._usage_so_far() if self.continuous else None
        return frame(chunk)

    def _tail(self, index: int) -> bytes:
        """Returns the end of a chunk with what was observed and counted so far."""
        logprobs = self.logprobs.take(index)
        shown = NO_LOGPROBS if logprobs is None else b',"logprobs":' + encode_json(logprobs)
        tail = self.format.close + shown + NO_FINISH
        if members := self._observations(index):
            tail += b"," + encode_json(members)[1:-1]
        tail += b"}]"
        if self.include_usage:
            tail += b',"usage":' + encode_json(self._usage_so_far() if self.continuous else None)
        return tail + b"}\n\n"

    def _observations(self, index: int) -> dict[str, Any]:
        """Takes what was observed of a choice since its last chunk, as members of the choice."""
        members: dict[str, Any] = {}
        if self.prompt_due[index]:
            self.prompt_due[index] = False
            members["prompt_token_ids"] = self._prompt_ids(index // self.n)
        ids, times = self.observed[index]
        if ids:
            self.observed[index] = ([], [])
            members |= self.shows.members(ids, times, self.response.arrived_at)
        return members

    def _prompt_ids(self, place: int) -> msgspec.Raw:
        if place not in self.prompt_ids:
            self.prompt_ids[place] = msgspec.Raw(encode_json(self.response.prompts[place]))
        return self.prompt_ids[place]

    def _usage_so_far(self) -> dict[str, Any]:
        reasoning = self.reasoned if self.format.chat else None
        return usage_object(self.response.prompt_tokens, sum(self.cached), self.counted, reasoning=reasoning)
