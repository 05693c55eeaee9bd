"""A closed loop of streaming chat clients: so many requests are in flight until all have been answered.

Every prompt is a new sequence of random words, so that no prefix cache can help. Measured by the client's clock:
the time to the first text of a request, the gaps between its texts, and output tokens per second of the whole run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.contestants import HOST, Server, event_text, events

TEMPLATE_TOKENS = 30  # what SmolLM2's chat template adds to a prompt
# Short common words: with the usual vocabularies each is one token.
WORDS = """able above across again alone along among answer apple arm autumn baby back ball bank base bath bear bed bell
bird black blood blue board boat body bone book bottle box boy branch bread brick bridge brother brown brush
building bus butter camera card cat chain chair cheese church city clock cloud coal coat coffee cold color
corn cotton country cow cup day dog door dress drink dust ear earth egg engine evening eye face family farm
father field finger fire fish floor flower food foot forest fruit garden girl glass gold grass green ground
hair hand hat head heart hill home horse hour house ice iron island key king kitchen knee knife lake lamp land
leaf leg letter light line lip lock man map market meat metal milk money moon morning mother mountain mouth
music name neck needle night north nose ocean office oil orange paint paper park pen picture pig plane plant
plate pocket pot potato queen rain red ring river road roof room root rope salt sand school sea seat seed
sheep ship shirt shoe shop silver sister skin sky snow soap song south spoon spring square star station stone
street sugar summer sun table tail tea time tooth town train tree truck valley village voice wall watch water
week west wheel white wind window winter wood wool yard year yellow young""".split()
REQUEST = "Write a long story in many chapters in which each of these words has a place."
REQUEST_TOKENS = 18


@dataclass
class Seen:
    """What one request gave."""

    started: float
    texts: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def prompt(source: random.Random, tokens: int) -> str:
    """About `tokens` tokens, chat template included."""
    words = (source.choice(WORDS) for _ in range(max(1, tokens - TEMPLATE_TOKENS - REQUEST_TOKENS)))
    return f"{' '.join(words)}\n\n{REQUEST}"


def run(
    server: Server, *, clients: int, requests: int, prompt_tokens: int, new_tokens: int, seed: int
) -> dict[str, float]:
    """Runs the loop against a ready server, after one request that is not counted. Raises RuntimeError if any fails."""
    return asyncio.run(_run(server, clients, requests, prompt_tokens, new_tokens, random.Random(seed)))


async def _run(
    server: Server, clients: int, requests: int, prompt_tokens: int, new_tokens: int, source: random.Random
) -> dict[str, float]:
    common = {"model": server.contestant.model, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    common |= {"stream_options": {"include_usage": True}} | server.contestant.full_length
    bodies = [
        common | {"messages": [{"role": "user", "content": prompt(source, prompt_tokens)}]} for _ in range(requests + 1)
    ]
    url = f"http://{HOST}:{server.port}/v1/chat/completions"
    timeout, connector = aiohttp.ClientTimeout(total=900), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await ask(session, url, bodies.pop())
        started, queue = time.perf_counter(), iter(bodies)

        async def client() -> list[Seen]:
            return [await ask(session, url, body) for body in queue]

        seen = [one for some in await asyncio.gather(*(client() for _ in range(clients))) for one in some]
        wall = time.perf_counter() - started
    return summary(seen, wall, new_tokens)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Seen:
    seen = Seen(started=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                seen.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return seen
            async for line in response.content:
                for event in events([line]):
                    if event.get("error"):
                        seen.error = str(event["error"])[:200]
                    if event_text(event):
                        seen.texts.append(time.perf_counter())
                    seen.usage = event.get("usage") or seen.usage
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        seen.error = f"{type(error).__name__}: {error}"[:200]
    return seen


def summary(seen: list[Seen], wall: float, new_tokens: int) -> dict[str, float]:
    failed = [one.error or "no text" for one in seen if one.error or not one.texts]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(seen)} requests failed, the first with: {failed[0]}")
    generated = sum(one.usage.get("completion_tokens") or len(one.texts) for one in seen)
    gaps = [later - earlier for one in seen for earlier, later in zip(one.texts, one.texts[1:], strict=False)]
    first = sorted(one.texts[0] - one.started for one in seen)
    return {
        "tokens_s": generated / wall,
        "ttft_s": statistics.median(first),
        "ttft_p95_s": first[min(len(first) - 1, int(len(first) * 0.95))],
        "gap_ms": statistics.median(gaps) * 1000 if gaps else 0.0,
        "length_share": generated / (len(seen) * new_tokens),  # 1: every answer had its full length
    }
