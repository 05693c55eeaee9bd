"""What each kernel of a step is run on, and its exact results, row by row.

A case has as many rows as the largest bucket has tokens, each with a number, its key. A bucket runs some of the keys, in any
order and among any others, and the row of a key must have the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from benchmarks.gpu_check.bench import Unit
from benchmarks.gpu_check.truth import DEVICE, Source, excess, rms_norm, rotate, silu_product, sum_error, wide

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Run:
    """What a bucket's unit is given: inputs, the elements of its outputs, and the keys of the rows that come out."""

    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, int]
    keys: list[int]


class Case(Protocol):
    """The rows of one unit."""

    def run(self, unit: Unit, keys: Sequence[int], spoilt: int) -> Run:
        """What to run these keys with. The last `spoilt` of them are only there to disturb the others."""
        ...

    def rows(self, run: Run, found: Mapping[str, Tensor]) -> Tensor:
        """The bytes of each key's results, [keys, bytes]."""
        ...

    def excess(self, run: Run, found: Mapping[str, Tensor]) -> float:
        """The largest error by what it may be."""
        ...


@dataclass
class Rows:
    """A kernel of rows that know nothing of each other. each: inputs by row; shared: others; exact: of each output, f64 rows
    and their errors. selected: out row i is row `rows[i]` of the input."""

    each: dict[str, Tensor] = field(default_factory=dict)
    shared: dict[str, Tensor] = field(default_factory=dict)
    exact: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    selected: bool = False

    def run(self, unit: Unit, keys: Sequence[int], spoilt: int) -> Run:
        index = torch.tensor(keys)
        inputs = dict(self.shared)
        for name, rows in self.each.items():
            inputs[name] = rows[index]
            if spoilt and rows.dtype in FLOATS:
                inputs[name][-spoilt:] = float("nan")
        kept = list(keys[: len(keys) - spoilt])
        if self.selected:
            order = [number % len(kept) for number in range(unit.rows - 1, -1, -1)]
            inputs["rows"] = torch.tensor(order, dtype=torch.int32)
            kept = [kept[number] for number in order]
        widths = {name: exact.shape[1] for name, (exact, _) in self.exact.items()}
        return Run(inputs, {name: width * unit.count(name, width) for name, width in widths.items()}, kept)

    def rows(self, run: Run, found: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([self._of(name, run, found).contiguous().view(torch.uint8) for name in self.exact], dim=1)

    def excess(self, run: Run, found: Mapping[str, Tensor]) -> float:
        index = torch.tensor(run.keys).to(DEVICE)
        return max(
            excess(self._of(name, run, found), exact[index], error[index])
            for name, (exact, error) in self.exact.items()
        )

    def _of(self, name: str, run: Run, found: Mapping[str, Tensor]) -> Tensor:
        return found[name].view(-1, self.exact[name][0].shape[1])[: len(run.keys)]


class Heads:
    """Queries, keys and values that are normed, turned and written to their places; a spoilt token is padding."""

    def __init__(self, unit: Unit, source: Source, count: int, slots: int) -> None:
        c = unit.constants
        self.heads, self.kv_heads, self.head_dim = c["HEADS"], c["KV_HEADS"], c["HEAD_DIM"]
        self.page_tokens, self.stride, self.table_stride = c["PAGE_TOKENS"], c["PAGE_STRIDE"], c["TABLE_STRIDE"]
        self.joint = unit.same("q", "k")
        self.width = self.heads * self.head_dim
        widths = [self.width, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim]
        whole = source.normal(count, sum(widths), dtype=unit.types["q"])
        self.projections = [whole] * 3 if self.joint else [part.contiguous() for part in whole.split(widths, dim=1)]
        used = min(self.table_stride, -(-count // (slots * self.page_tokens)) + 1)
        places = source.order(slots * used * self.page_tokens)[:count]
        self.slots, self.positions = places // (used * self.page_tokens), places % (used * self.page_tokens)
        self.table = torch.full((slots, self.table_stride), -1, dtype=torch.int32)
        self.table[:, :used] = source.order(slots * used).view(slots, used).int()
        self.element = unit.types["k_pages"]
        self.pool = torch.full((slots * used * self.stride,), 0xFF, dtype=torch.uint8).repeat(self.element.itemsize)
        self.pool = self.pool.view(self.element)
        size = self.element.itemsize
        self.starts = [unit.arguments[name].offset // size for name in ("k_pages", "v_pages")]  # type: ignore[union-attr]
        self.extra = {n: source.normal(self.head_dim) for n in ("q_norm", "k_norm") if n in unit.types}
        self.angles: dict[str, Tensor] = {}
        if "cos" in unit.types:
            angle = source.normal(count, self.head_dim // 2)
            self.angles = {"cos": angle.cos(), "sin": angle.sin()}
        eps = unit.scalar("eps")
        parts = [wide(part).view(count, -1, self.head_dim) for part in whole.split(widths, dim=1)]
        self.exact = [(part, torch.zeros_like(part)) for part in parts]
        for i, name in enumerate(("q_norm", "k_norm")):
            value, error = self.exact[i]
            if name in self.extra:
                value = rms_norm(value, wide(self.extra[name]), eps)
                error = 1e-6 * value.abs()
            if self.angles:
                value, magnitude = rotate(value, wide(self.angles["cos"]), wide(self.angles["sin"]))
                error = 1e-6 * magnitude
            self.exact[i] = value, error

    def run(self, unit: Unit, keys: Sequence[int], spoilt: int) -> Run:
        index = torch.tensor(keys)
        live = torch.arange(len(keys)) < len(keys) - spoilt
        inputs = dict(zip(("q", "k", "v"), (part[index] for part in self.projections), strict=True))
        if self.joint:
            inputs |= dict.fromkeys(("k", "v"), inputs["q"])
        inputs |= self.extra | {name: angle[index] for name, angle in self.angles.items()}
        inputs["positions"] = torch.where(live, self.positions[index], -1).int()
        inputs["slots"] = torch.where(live, self.slots[index], 0).int()
        inputs |= {"page_table": self.table, "pool": self.pool}
        outputs = {"out": self.width * len(keys), "pool": self.pool.numel()}
        return Run(inputs, outputs, list(keys[: len(keys) - spoilt]))

    def rows(self, run: Run, found: Mapping[str, Tensor]) -> Tensor:
        parts = [part.reshape(len(run.keys), -1).contiguous().view(torch.uint8) for part in self._parts(run, found)]
        return torch.cat(parts, dim=1)

    def excess(self, run: Run, found: Mapping[str, Tensor]) -> float:
        index = torch.tensor(run.keys).to(DEVICE)
        parts = zip(self._parts(run, found), self.exact, strict=True)
        worst = max(excess(part, exact[index], error[index]) for part, (exact, error) in parts)
        expected = self.pool.clone().view(torch.uint8)
        left = found["pool"].clone().view(torch.uint8)
        for start in self.starts:
            place = (self._places(run.keys, start)[..., None] * self.element.itemsize).flatten()
            span = torch.arange(self.head_dim * self.element.itemsize)
            expected[(place[:, None] + span).flatten()] = left[(place[:, None] + span).flatten()]
        return worst if torch.equal(expected, left) else float("inf")

    def _parts(self, run: Run, found: Mapping[str, Tensor]) -> list[Tensor]:
        """Queries [keys, heads, head_dim], and keys and values as they lie in the pool."""
        out = found["out"].view(-1, self.heads, self.head_dim)[: len(run.keys)]
        span = torch.arange(self.head_dim)
        return [out, *(found["pool"][self._places(run.keys, start)[..., None] + span] for start in self.starts)]

    def _places(self, keys: Sequence[int], start: int) -> Tensor:
        """Where in the pool a key's heads begin, [keys, kv_heads]."""
        index = torch.tensor(keys)
        position = self.positions[index]
        page = self.table[self.slots[index], position // self.page_tokens].long()
        offset = torch.arange(self.kv_heads) * self.page_tokens + (position % self.page_tokens)[:, None]
        return page[:, None] * self.stride + start + offset * self.head_dim


class Attention:
    """Tokens of a few slots with contexts of very different lengths, in pages in no order; a spoilt token is padding."""

    def __init__(self, unit: Unit, source: Source, count: int, slots: int, context: int) -> None:
        c = unit.constants
        self.heads, self.kv_heads, self.head_dim = c["HEADS"], c["KV_HEADS"], c["HEAD_DIM"]
        self.window, stride, page_tokens = c["WINDOW"], c["PAGE_STRIDE"], c["PAGE_TOKENS"]
        self.element = unit.types["k"]
        self.width = self.heads * self.head_dim
        used = min(4, slots, count)
        shares = [count // used + (number < count % used) for number in range(used)]
        ends = (1100, 300, 70, 5)
        lengths = [min(context, max(end, share)) for end, share in zip(ends, shares, strict=False)]
        self.places = [
            (slot, position)
            for slot, (length, share) in enumerate(zip(lengths, shares, strict=True))
            for position in range(length - share, length)
        ]
        shape = (used, max(lengths), self.kv_heads, self.head_dim)
        self.keys, self.values = (source.normal(*shape, dtype=self.element) for _ in range(2))
        self.queries = source.normal(count, self.width, dtype=unit.types["q"])
        pages = -(-max(lengths) // page_tokens)
        self.table = torch.full((slots, c["PAGES"]), -1, dtype=torch.int32)
        self.table[:used, :pages] = source.order(used * pages).view(used, pages).int()
        self.pool = torch.full((used * pages * stride,), float("nan"), dtype=self.element)
        starts = [unit.arguments[name].offset // self.element.itemsize for name in ("k", "v")]  # type: ignore[union-attr]
        span = torch.arange(self.head_dim)
        for slot, length in enumerate(lengths):
            position = torch.arange(length)
            page = self.table[slot, position // page_tokens].long()
            head = torch.arange(self.kv_heads) * page_tokens + (position % page_tokens)[:, None]
            for start, rows in zip(starts, (self.keys, self.values), strict=True):
                at = (page * stride)[:, None, None] + start + (head * self.head_dim)[..., None] + span
                self.pool[at] = rows[slot, :length]
        self.scale = float(unit.scalar("exponent")) / 1.4426950408889634
        self.exact = [self._exact(key) for key in range(count)]

    def run(self, unit: Unit, keys: Sequence[int], spoilt: int) -> Run:
        runs: list[int] = []
        for key in sorted(keys[: len(keys) - spoilt]):
            if not runs or self._follows(runs[-1], key):
                runs.append(key)
        order = torch.tensor(runs + [runs[0]] * (len(keys) - len(runs)))
        live = torch.arange(len(keys)) < len(runs)
        slots, positions = torch.tensor([self.places[key] for key in order.tolist()]).T
        queries = self.queries[order].clone()
        queries[~live] = float("nan")
        inputs = {
            "q": queries,
            "positions": torch.where(live, positions, -1).int(),
            "slots": torch.where(live, slots, 0).int(),
            "page_table": self.table,
            "pool": self.pool,
        }
        return Run(inputs, {"out": self.width * len(keys)}, runs)

    def rows(self, run: Run, found: Mapping[str, Tensor]) -> Tensor:
        return found["out"].view(-1, self.width)[: len(run.keys)].contiguous().view(torch.uint8)

    def excess(self, run: Run, found: Mapping[str, Tensor]) -> float:
        out = found["out"].view(-1, self.width)
        if bool((out[len(run.keys) :] != 0).any()):
            return float("inf")  # padding is zero
        return max(excess(out[row], *self.exact[key]) for row, key in enumerate(run.keys))

    def _follows(self, before: int, key: int) -> bool:
        """Whether a key may come next in a step: its slot is another one, or its position the next."""
        (slot, position), (last_slot, last) = self.places[key], self.places[before]
        return slot != last_slot or position == last + 1

    def _exact(self, key: int) -> tuple[Tensor, float]:
        """A token's output in f64 and its error: weights are rounded to the pool's element and off by the error of their
        scores, sums of both by as much relative to the largest value."""
        slot, position = self.places[key]
        first = max(0, position - self.window + 1) if self.window else 0
        group = self.heads // self.kv_heads
        query = wide(self.queries[key].to(self.element)).view(self.heads, self.head_dim)
        keys, values = (
            wide(rows[slot, first : position + 1]).repeat_interleave(group, dim=1) for rows in (self.keys, self.values)
        )
        weights = (torch.einsum("hd,shd->hs", query, keys) * self.scale).softmax(dim=-1)
        out = torch.einsum("hs,shd->hd", weights, values).flatten()
        unit = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-11, torch.float32: 2.0**-24}[self.element]
        size = float(torch.einsum("hd,shd->hs", query.abs(), keys.abs()).max()) * self.scale
        weight = unit + (self.head_dim + 8) * 2.0**-24 * size + (len(keys) + 16) * 2.0**-23
        tiny = len(keys) * 2.0**-25 if self.element == torch.float16 else 0.0
        return out, (2.1 * (weight + tiny) + 0.1 * unit) * float(values.abs().max())


def make_case(unit: Unit, source: Source, count: int, slots: int, context: int) -> Case:
    """The case of a unit with `count` rows. Raises KeyError for a kernel that has none: whoever adds one to the cuda target
    adds its truth here."""
    if unit.sources[0] in ("attention_decode.attention_split", "attention_prefill.attention_tile"):
        return Attention(unit, source, count, slots, context)
    if unit.sources[0] == "heads.heads":
        return Heads(unit, source, count, slots)
    return ROWS[unit.sources[0]](unit, source, count)


def _embed(unit: Unit, source: Source, count: int) -> Rows:
    width, format = unit.constants["WIDTH"], unit.constants["FORMAT"]
    dtype = unit.types["values"]
    per_row = width // 2 if format == "q4" else width
    vocabulary = unit.count("values", per_row)
    arrays, exact, _ = source.matrix(format, vocabulary, width, dtype)
    tokens = source.integers(0, vocabulary, count)
    wanted = exact[tokens.long().to(DEVICE)]
    shared = dict(zip(("values", "scale", "minimum"), arrays, strict=False))
    return Rows({"tokens": tokens}, shared, {"out": (wanted, torch.zeros_like(wanted))})


def _rms_norm(unit: Unit, source: Source, count: int) -> Rows:
    width = unit.constants["WIDTH"]
    x, weight = source.normal(count, width), source.normal(width)
    wanted = rms_norm(wide(x), wide(weight), unit.scalar("eps"))
    return Rows({"x": x}, {"weight": weight}, {"out": (wanted, 1e-6 * wanted.abs())}, "rows" in unit.types)


def _rope_angles(unit: Unit, source: Source, count: int) -> Rows:
    half, scale = unit.constants["HALF"], unit.scalar("scale")
    positions = source.integers(0, 1 << 15, count)
    frequencies = torch.logspace(0, -4, half)
    angle = wide(positions.float()[:, None] * frequencies)
    error = torch.full_like(angle, 4e-7 * max(1.0, scale))
    exact = {"cos": (angle.cos() * scale, error), "sin": (angle.sin() * scale, error)}
    return Rows({"positions": positions}, {"inv_freq": frequencies}, exact)


def _take_rows(unit: Unit, source: Source, count: int) -> Rows:
    x = source.normal(count, unit.constants["WIDTH"])
    return Rows({"x": x}, {}, {"out": (wide(x), torch.zeros_like(wide(x)))}, True)


def _linear(unit: Unit, source: Source, count: int) -> Rows:
    c = unit.constants
    n, k = c["N"], c["K"]
    arrays, exact, parts = source.matrix(c.get("FORMAT", "float"), n, k, unit.types["w"])
    x = source.normal(count, k, dtype=unit.types["x"])
    wanted, size = wide(x) @ exact.T, wide(x).abs() @ parts.T
    case = Rows({"x": x}, dict(zip(("w", "scale", "minimum"), arrays, strict=False)))
    for name, term, held in (
        ("bias", source.normal(n), case.shared),
        ("residual", source.normal(count, n), case.each),
    ):
        if name in unit.types:
            held[name] = term
            wanted, size = wanted + wide(term), size + wide(term).abs()
    case.exact["out"] = wanted, sum_error(k) * size
    return case


def _gate_up(unit: Unit, source: Source, count: int) -> Rows:
    c = unit.constants
    n, k = c["N"], c["K"]
    x = 0.25 * source.normal(count, k)
    x = x.to(unit.types["x"])
    case = Rows({"x": x})
    sums, errors = [], []
    for name in ("gate", "up"):
        arrays, exact, parts = source.matrix(c["FORMAT"], n, k, unit.types[name])
        case.shared |= dict(zip((name, f"{name}_scale", f"{name}_minimum"), arrays, strict=False))
        total, size = wide(x) @ exact.T, wide(x).abs() @ parts.T
        if f"{name}_bias" in unit.types:
            case.shared[f"{name}_bias"] = bias = source.normal(n)
            total, size = total + wide(bias), size + wide(bias).abs()
        sums.append(total)
        errors.append(sum_error(k) * size)
    case.exact["out"] = silu_product(sums[0], sums[1], errors[0], errors[1])
    return case


def _silu_mul(unit: Unit, source: Source, count: int) -> Rows:
    width = int(unit.scalar("elements")) // unit.tokens
    gate, up = (source.normal(count, width, dtype=unit.types[name]) for name in ("gate", "up"))
    none = torch.zeros(count, width, dtype=torch.float64, device=DEVICE)
    return Rows({"gate": gate, "up": up}, {}, {"out": silu_product(wide(gate), wide(up), none, none)})


def _add(unit: Unit, source: Source, count: int) -> Rows:
    width = int(unit.scalar("elements")) // unit.tokens
    a, b = source.normal(count, width), source.normal(count, width)
    exact = wide(a) + wide(b)
    return Rows({"a": a, "b": b}, {}, {"out": (exact, torch.zeros_like(exact))})


def _rounded(unit: Unit, source: Source, count: int) -> Rows:
    x = source.normal(count, int(unit.scalar("elements")) // unit.tokens)
    return Rows({"x": x}, {}, {"out": (wide(x), torch.zeros_like(wide(x)))})


ROWS = {
    "embedding.embed": _embed,
    "embedding.take_rows": _take_rows,
    "norm.rms_norm": _rms_norm,
    "rotary.rope_angles": _rope_angles,
    "linear.linear": _linear,
    "quantised_linear.quantised_linear": _linear,
    "gate_up.gate_up": _gate_up,
    "elementwise.silu_mul": _silu_mul,
    "elementwise.add": _add,
    "elementwise.rounded": _rounded,
}
"""By kernel: the case of a launch whose rows know nothing of each other."""
