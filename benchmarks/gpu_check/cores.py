"""A whole core, opened as a server opens it: its oracle, the same bits in every company, and draws from its own logits."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.gpu_check.findings import Checks, Finding, at_most, measured
from benchmarks.gpu_check.rated import logprob_excess, wanted_token
from flare.core.cuda_graph import CudaGraphs, KernelNode
from flare.core.directory import Core, open_core
from flare.core.manifest import MAX_ALTERNATIVES
from flare.core.oracle import Prompt, read_oracle, tolerance
from flare.replay.cpu_interface import SampleParams
from flare.replay.cuda import CudaReplay
from flare.replay.cuda_driver import open_device
from flare.replay.cuda_program import CudaProgram
from flare.replay.oracle import check_oracle, score_prompt

Part = tuple[int, int, int]
"""A slot, and the first and the last but one position of its tokens in a step."""


def open_replay(core: Core, kv_pages: int) -> tuple[CudaReplay, CudaGraphs]:
    """Opens a core's cuda target on the first device that it has kernels for; returns the graphs that it runs, too."""
    assert core.manifest.cuda is not None
    device = open_device(core.manifest.cuda.architectures)
    program = CudaProgram.open(core, device.architecture)  # type: ignore[arg-type]
    return CudaReplay(program, device=device, kv_pages=kv_pages), program.graphs


def few_tokens(graphs: CudaGraphs) -> int:
    """The most tokens of a step that runs other kernels than the largest steps do; 0 where all run the same."""
    kernels = [{node.kernel for node in bucket.nodes if isinstance(node, KernelNode)} for bucket in graphs.step]
    return max(
        (bucket.tokens for bucket, used in zip(graphs.step, kernels, strict=True) if used != kernels[-1]), default=0
    )


def check_core(checks: Checks, path: Path) -> None:
    """Checks one core on a device."""
    core = open_core(path)
    assert core.manifest.cuda is not None
    oracle, limits = read_oracle(core), core.manifest.limits
    prompts = oracle.prompts[: limits.slots]
    pages = limits.slots * -(-max(len(prompt.tokens) for prompt in oracle.prompts) // limits.page_tokens)
    replay, graphs = open_replay(core, pages)
    with replay:
        company = Company(replay, prompts, few_tokens(graphs))
        allowed = tolerance(core.manifest.cuda.formats)

        def oracle_replayed() -> Finding:
            return measured(check_oracle(replay, oracle, "the device", allowed))

        checks.run("oracle", oracle_replayed)
        checks.run("rows one by one", company.one_by_one)
        checks.run("rows in mixed steps", company.mixed)
        checks.run("rows in one full step", company.full)
        checks.run("greedy tokens", company.greedy)
        checks.run("draws from its logits", company.draws)


class Company:
    """The oracle's prompts alone and beside each other. A prompt's row at a position is known by a hash of its logits.
    few: the most tokens of a step that runs other kernels than the largest steps do."""

    def __init__(self, replay: CudaReplay, prompts: Sequence[Prompt], few: int) -> None:
        self.replay = replay
        self.prompts = prompts
        self.few = few
        self._alone: list[list[str]] = []

    @property
    def alone(self) -> list[list[str]]:
        """The hashes of every prompt's rows, replayed alone, in steps of as many tokens as there are rows."""
        if not self._alone:
            self._alone = [score_prompt(self.replay, p.tokens, lambda *_: None).hashes for p in self.prompts]
        return self._alone

    def one_by_one(self) -> Finding:
        """The shortest prompt in steps of one token, in another slot and other pages."""
        number = min(range(len(self.prompts)), key=lambda i: len(self.prompts[i].tokens))
        slot = self.replay.limits.slots - 1
        wanted, found = self.alone[number], []
        self._own_pages(slot)
        for position in range(len(wanted)):
            found += self._step([(slot, position, position + 1)], {slot: number})
        differing = sum(one != other for one, other in zip((h for _, _, h in found), wanted, strict=True))
        return at_most(differing, 0, "rows whose bits differ from those of larger steps", rows_compared=len(wanted))

    def mixed(self) -> Finding:
        """All prompts at once, in parts of random length: up to 17 tokens of each in a step."""
        alone, differing, compared = self.alone, 0, 0  # before any step: it takes the first slot and its pages
        slots = {slot: slot for slot in range(len(self.prompts))}
        for slot in slots:
            self._own_pages(slot)
        for parts in self._schedule():
            for slot, position, digest in self._step(parts, slots):
                compared += 1
                differing += digest != alone[slot][position]
        return at_most(differing, 0, "rows whose bits differ from those alone", rows_compared=compared)

    def full(self) -> Finding:
        """The prompts over and over, one in each slot, in a step of as many tokens as it can take: that of the largest bucket,
        where the slots hold so many. It runs again until each of its rows was among those with logits."""
        limits, alone = self.replay.limits, self.alone
        slots = {slot: slot % len(self.prompts) for slot in range(limits.slots)}
        parts: list[Part] = []
        room = limits.max_step_tokens
        for slot, number in slots.items():
            self._own_pages(slot)
            if count := min(room, len(self.prompts[number].tokens)):
                parts.append((slot, 0, count))
                room -= count
        tokens = limits.max_step_tokens - room
        differing = compared = 0
        for first in range(0, tokens, limits.max_rows):
            rows = range(first, min(first + limits.max_rows, tokens))
            for slot, position, digest in self._step(parts, slots, rows):
                compared += 1
                differing += digest != alone[slots[slot]][position]
        if self.few and tokens <= self.few:
            note = f"a step of {tokens} tokens shows nothing of the kernels of more than {self.few}; give the core more slots"
            return Finding(False, tokens, self.few, note)
        return at_most(differing, 0, "rows whose bits differ from those alone", rows_compared=compared, tokens=tokens)

    def greedy(self) -> Finding:
        """Each prompt's continuation, drawn alone and beside the others: the same tokens. How many are the reference's."""
        alone = [self._continued([number])[0] for number in range(len(self.prompts))]
        together = self._continued(range(len(self.prompts)))
        differing = sum(
            one != other for a, b in zip(alone, together, strict=True) for one, other in zip(a, b, strict=True)
        )
        wanted = [prompt.tokens[prompt.prompt_tokens :] for prompt in self.prompts]
        tokens = sum(map(len, wanted))
        equal = sum(one == other for a, b in zip(alone, wanted, strict=True) for one, other in zip(a, b, strict=True))
        return at_most(differing, 0, "greedy tokens that differ in a batch", tokens=tokens, equal_to_reference=equal)

    def draws(self) -> Finding:
        """Draws from the logits of a step, and their log probabilities."""
        replay, count = self.replay, min(len(self.prompts), self.replay.max_rows)
        for slot in range(count):
            self._own_pages(slot)
        self._step([(slot, 0, 1) for slot in range(count)], {slot: slot for slot in range(count)})
        worst, differing, drawn = 0.0, 0, 0
        for seed, fields in enumerate(({"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.0})):
            for row in range(count):
                replay.sampling[row] = _params(seed=seed * 97 + row, **fields)
            replay.sample(count)
            for row in range(count):
                logits = np.array(replay.logits(row), np.float32)
                token = replay.sampled[row]
                drawn += 1
                differing += token != wanted_token(logits, replay.sampling[row], (), None)
                worst = max(worst, logprob_excess(logits, token, replay.logprobs[row], MAX_ALTERNATIVES, ()))
        found = at_most(
            worst, 1.0, "largest error of a log probability by what it may be", drawn=drawn, differing=differing
        )
        return found if not differing else Finding(False, differing, 0, "tokens that the definition does not draw")

    def _schedule(self) -> Iterator[list[Part]]:
        """Parts of all prompts, in steps that the replay can take, until all are through."""
        chosen, limits = random.Random(0), self.replay.limits
        done = [0] * len(self.prompts)
        while left := [slot for slot, prompt in enumerate(self.prompts) if done[slot] < len(prompt.tokens)]:
            parts, room = [], min(limits.max_step_tokens, chosen.choice((limits.max_rows, limits.max_step_tokens)))
            for slot in chosen.sample(left, len(left)):
                length = len(self.prompts[slot].tokens)
                count = min(chosen.choice((1, 3, 17)), length - done[slot], room)
                if count:
                    parts.append((slot, done[slot], done[slot] + count))
                    done[slot] += count
                    room -= count
            yield parts

    def _step(
        self, parts: Sequence[Part], prompts: dict[int, int], rows: Sequence[int] | None = None
    ) -> list[tuple[int, int, str]]:
        """Runs a step; returns slot, position and hash of the rows of these tokens, else of as many as there may be, the last
        ones first."""
        replay, tokens = self.replay, [(slot, position) for slot, begin, end in parts for position in range(begin, end)]
        for i, (slot, position) in enumerate(tokens):
            replay.tokens[i] = self.prompts[prompts[slot]].tokens[position]
            replay.positions[i], replay.slots[i] = position, slot
        rows = list(range(len(tokens)))[::-1][: replay.max_rows] if rows is None else list(rows)
        replay.rows[: len(rows)] = rows
        replay.step(len(tokens), len(rows))
        digests = [hashlib.sha256(replay.logits(row)).hexdigest()[:32] for row in range(len(rows))]
        return [(*tokens[row], digest) for row, digest in zip(rows, digests, strict=True)]

    def _continued(self, numbers: Sequence[int]) -> list[list[int]]:
        """The greedy continuations of prompts, in one batch."""
        replay = self.replay
        given = {slot: self.prompts[number].prompt_tokens for slot, number in enumerate(numbers)}
        wanted = {slot: len(self.prompts[number].tokens) - given[slot] for slot, number in enumerate(numbers)}
        fed = {slot: self.prompts[n].tokens[: given[slot]] for slot, n in enumerate(numbers) if wanted[slot]}
        position = dict.fromkeys(fed, 0)
        found: dict[int, list[int]] = {slot: [] for slot in wanted}
        for slot in fed:
            self._own_pages(slot)
            replay.sampling[slot] = _params(temperature=0.0, alternatives=-1)  # of a row: there are as many as slots
        while fed:
            count, ends = 0, []
            for slot, tokens in fed.items():
                room = replay.limits.max_step_tokens - count - (len(fed) - len(ends) - 1)
                taken, fed[slot] = tokens[:room], tokens[room:]
                for token in taken:
                    replay.tokens[count], replay.positions[count], replay.slots[count] = token, position[slot], slot
                    count, position[slot] = count + 1, position[slot] + 1
                ends.append(slot)
                replay.rows[len(ends) - 1] = count - 1
            replay.step(count, len(ends))
            replay.sample(len(ends))
            for row, slot in enumerate(ends):
                if fed[slot]:
                    continue  # of a prompt that did not fit into the step
                token = replay.sampled[row]
                found[slot].append(token)
                fed[slot] = [token]
                if len(found[slot]) == wanted[slot]:
                    del fed[slot]
        return [found[slot] for slot in sorted(found)]

    def _own_pages(self, slot: int) -> None:
        """Gives a slot pages of its own, in descending order."""
        limits = self.replay.limits
        each = self.replay.kv_pages // limits.slots
        for index in range(each):
            self.replay.page_table[slot * limits.page_stride + index] = slot * each + each - 1 - index


def _params(**fields: float) -> SampleParams:
    return SampleParams(**({"top_p": 1.0, "repetition": 1.0, "alternatives": MAX_ALTERNATIVES} | fields))
