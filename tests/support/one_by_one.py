"""Generation of one request by itself, straight from its definition: what any schedule must reproduce."""

from __future__ import annotations

from flare.engine.request import Request, StopCause
from flare.replay.cpu import SampleParams
from tests.support.scripted_replay import ScriptedModel


def one_by_one(model: ScriptedModel, request: Request, context: int) -> tuple[list[int], StopCause]:
    """The reply, a terminating stop token included, and its cause."""
    draw = SampleParams()
    request.sampling.write(draw, request.choice, len(request.prompt))
    tokens, cells, reply = list(request.prompt), model.extend([], request.prompt), []
    while True:
        draw.position = len(tokens)
        token = model.choose(cells, draw, tokens)
        if request.forced is not None and len(reply) == request.forced.after and request.forced.applies(reply):
            token = request.forced.token
        cells += model.extend(cells, [token])
        tokens.append(token)
        reply.append(token)
        if token in request.stop_tokens:
            return reply, StopCause.STOP_TOKEN
        if len(reply) == request.max_new_tokens:
            return reply, StopCause.MAX_TOKENS
        if len(tokens) == context:
            return reply, StopCause.CONTEXT_FULL
