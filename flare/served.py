"""The model that is being served: its names and limits, and the rules that fill in what a request leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flare.conversation import GenerationRequest, SamplingRequest
from flare.core.sampling import NEUTRAL, VALID
from flare.errors import RequestError, SettingError
from flare.output import OutputSyntax

NO_SYNTAX = OutputSyntax()
"""All text is answer."""

GREEDY_BELOW = 1e-4
"""A positive temperature under this is greedy too: in f32 the scaled logits would overflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What requests are resolved against. Token counts unless said otherwise.

    `names` are accepted by the model routes, `id` (an alias or the checkpoint's name) is what responses show, `root` is
    the checkpoint's name, `created` is in Unix seconds. `ranges` is None where every valid value passes, else it maps a
    parameter to its inclusive bounds and fixes the rest. `eos` ends a reply unless the request ignores it.
    `thinking` is the probe's table, in the shape that `/v1/models` shows. `leading_system` and `inline_system` say whether the
    template renders a system message in the first place and in a later one, `content_parts` that it takes a message's content
    as a list of parts alone. `output` is how the model writes reasoning and
    calls; `opens_reasoning` says that a reply begins within reasoning where no level of thinking says otherwise,
    `generation_prompt_switch` that the template opens replies only where it is asked to;
    `shows_tools` says that the template shows the model its tools, `tool_arguments` is the form in which it takes
    the arguments of calls in a history, `default_system` what it says where a conversation has no system message,
    `continuation` what it puts behind an assistant's last message (None: such a message cannot be continued).
    `strict_tools` says what becomes of function schemas that ask to be enforced, `thinking_token_budget` is that of
    conversations which name none. `variables` are those that the template reads and a request may set, the thinking controls
    included. `decode_weight_bytes` is what one decode step reads of the weights, 0 where that is not
    known. `max_top_logprobs` is the most natural alternatives with log probabilities, 0 for a core without any;
    `explicit_ids` the most ids whose log probabilities may be asked for instead; `scores_prompts` says whether those of a
    prompt's tokens may be. `target` is the kind of the core's target that serves, "cpu" or "cuda", `device` what runs it.
    """

    id: str
    root: str
    names: tuple[str, ...]
    created: int
    fingerprint: str
    context_length: int
    vocabulary: int
    max_concurrency: int
    prefill_chunk: int
    bos: int | None
    eos: frozenset[int]
    thinking: Mapping[str, Any]
    inline_system: bool
    has_template: bool
    leading_system: bool = True
    content_parts: bool = False
    output: OutputSyntax = NO_SYNTAX
    opens_reasoning: bool = False
    generation_prompt_switch: bool = True
    shows_tools: bool = True
    tool_arguments: Literal["mapping", "string"] = "mapping"
    default_system: str | None = None
    continuation: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float] | None] | None = None
    max_tokens_cap: int | None = None
    decode_weight_bytes: int = 0
    strict_tools: Literal["refuse", "relax"] = "refuse"
    thinking_token_budget: int | None = None
    variables: frozenset[str] = frozenset()
    max_top_logprobs: int = 0
    explicit_ids: int = 0
    scores_prompts: bool = False
    target: Literal["cpu", "cuda"] = "cpu"
    device: str = "generic"

    @property
    def takes_tools(self) -> bool:
        """Whether requests may offer tools: the template shows them, and the model's calls can be read."""
        return self.output.tools is not None and self.shows_tools

    @property
    def levels(self) -> list[str]:
        """The names of the thinking levels."""
        return [level["id"] for level in self.thinking["levels"]]

    def sampling_default(self, name: str) -> Any:
        """Returns the prepared default of a sampling field, or the neutral one."""
        value = self.defaults.get(name)
        return NEUTRAL[name] if value is None else value

    def resolve_sampling(self, request: SamplingRequest) -> dict[str, Any]:
        """Returns the value of every distribution parameter. Raises RequestError naming a field out of its range."""
        resolved = {name: self._resolve(name, getattr(request, name)) for name in NEUTRAL}
        if resolved["temperature"] < GREEDY_BELOW:
            resolved["temperature"] = 0.0
        return resolved

    def _resolve(self, name: str, value: float | None) -> float:
        if value is None:
            return self.sampling_default(name)
        if self.ranges is None:
            low, high = VALID[name]
            if not low <= value <= high:
                raise RequestError(f"{name}: {value} is outside {low:.10g} to {high:.10g}", param=name)
            return value
        bounds = self.ranges.get(name)
        if bounds is None:
            return self.sampling_default(name)
        return min(max(value, bounds[0]), bounds[1])

    def resolve_limit(self, request: GenerationRequest, prompt_tokens: int) -> int | None:
        """Returns how many tokens may be generated, None when only the context bounds them.

        Order: the request, the operator's cap, `max_new_tokens` of the model's files; their `max_length` bounds prompt
        plus reply for the last two. Raises RequestError when the request asks for more than the cap.
        """
        cap = self.max_tokens_cap
        if request.max_tokens is not None:
            if cap is not None and request.max_tokens > cap:
                field_name = request.max_tokens_field
                raise RequestError(
                    f"{field_name}: {request.max_tokens} is over this server's limit of {cap} tokens", param=field_name
                )
            return request.max_tokens
        limit = cap if cap is not None else self.defaults.get("max_new_tokens")
        max_length = self.defaults.get("max_length")
        if max_length is not None:
            room = max(1, max_length - prompt_tokens)
            limit = room if limit is None else min(limit, room)
        return limit

    def check_room(
        self, prompt_tokens: int, prompt_field: str, *, least: int = 1, question: bool = False, counted: bool = True
    ) -> None:
        """Raises RequestError (context_full) when a prompt, or a state with its `question`, leaves no room for a reply, which
        has at least so many tokens. A prompt that was not `counted` has `prompt_tokens` or more."""
        if prompt_tokens + least <= self.context_length:
            return
        what, remedy = (
            ("state and question together are", "shorten them")
            if question
            else (
                "the prompt is",
                "compact or shorten " + ("the conversation" if prompt_field == "messages" else "the prompt"),
            )
        )
        many = f"{prompt_tokens} tokens" if counted else f"at least {prompt_tokens} tokens"
        raise RequestError(
            f"{what} {many} and the context holds {self.context_length}; {remedy}",
            param=prompt_field,
            code="context_full",
            extra={"flare_context": self.context(prompt_tokens) | ({} if counted else {"at_least": True})},
        )

    def context(self, tokens_used: int) -> dict[str, int]:
        """Returns the `flare_context` object for a prompt (and reply) of this many tokens."""
        return {
            "tokens_used": tokens_used,
            "context_length": self.context_length,
            "tokens_remaining": max(0, self.context_length - tokens_used),
        }


def with_temperature(
    chosen: float | None,
    defaults: Mapping[str, Any],
    sources: Mapping[str, str],
    ranges: Mapping[str, tuple[float, float] | None] | None,
) -> tuple[Mapping[str, Any], Mapping[str, str]]:
    """Returns the sampling defaults and their sources with the operator's temperature, if one was chosen.

    Raises SettingError for one that the author's ranges of the core do not allow.
    """
    if chosen is None:
        return defaults, sources
    if ranges is not None:
        default = defaults.get("temperature")
        least, most = ranges.get("temperature") or (NEUTRAL["temperature"] if default is None else default,) * 2
        if not least <= chosen <= most:
            allowed = f"{least:g} to {most:g}" if least < most else f"{least:g} alone"
            raise SettingError(
                "temperature",
                f"{chosen:g}: the author's range of this core is {allowed}; choose a value in it, or export the core "
                "with --sampling-ranges open",
            )
    return {**defaults, "temperature": chosen}, {**sources, "temperature": "server_option"}
