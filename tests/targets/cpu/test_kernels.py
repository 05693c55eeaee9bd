"""Every cpu kernel against float64, and bit for bit against itself: alone, batched, split, paged anew, v3 and v4."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.support.packing_reference import (
    unpack_activations,
)
from tests.targets.cpu.kernel_cases import CASES, case_name
from tests.targets.cpu.kernel_cases_dense import quantize
from tests.targets.cpu.kernel_cases_pages import KIND, attention, keys_of, values_of
from tests.targets.cpu.kernel_harness import Library, Tokens, build
from tests.targets.cpu.kernel_operands import LEVELS, Case, Offset, PerRow


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Library]:
    return build(list(dict.fromkeys(case.kernel for case in CASES)), tmp_path_factory.mktemp("kernels"))


each_level = pytest.mark.parametrize("level", LEVELS)
each_case = pytest.mark.parametrize("case", CASES, ids=case_name)


@each_level
@each_case
def test_agrees_with_float64(libraries: dict[str, Library], case: Case, level: str) -> None:
    case.check(case.run(libraries[level]))


@each_level
@each_case
def test_bits_do_not_depend_on_what_is_computed_together(libraries: dict[str, Library], case: Case, level: str) -> None:
    library = libraries[level]
    together = case.run(library)
    units = library.units(case.kernel, case.tokens)
    one_by_one = [(u, u + 1) for u in range(units)]
    third = max(1, units // 3)
    thirds = [(u, min(u + third, units)) for u in range(0, units, third)]
    for claims in (one_by_one, one_by_one[::-1], thirds[::-1]):
        assert case.run(library, claims).tobytes() == together.tobytes()
    assert case.run_alone(library).tobytes() == together.tobytes()


@each_case
def test_v3_and_v4_give_the_same_bits(libraries: dict[str, Library], case: Case) -> None:
    results = {case.run(library).tobytes() for level, library in libraries.items() if level != "generic"}
    assert len(results) <= 1


@each_case
def test_needs_are_the_sizes_of_the_operands(libraries: dict[str, Library], case: Case) -> None:
    """Every kernel states each argument's bytes: no fewer, or a core could lie; no more, or a good core is refused."""
    tokens, args = case.fresh()
    page_bytes = {o.bytes: 0 for o in case.operands if isinstance(o, Offset)}
    if page_bytes:
        name, inside = case.kernel.rstrip(">").split("<")
        p = [part.strip() for part in inside.split(",")]
        at = {"Attention": (1, 2, 3, 4), "KvWrite": (0, 1, 2, 3), "Heads": (2, 3, 8, 9)}[name]
        kh, dh, kv, pt = (p[i] for i in at)
        page_bytes = dict.fromkeys(page_bytes, int(kh) * int(dh) * int(pt) * KIND[kv]().itemsize)
    for library in libraries.values():
        needs = library.needs(case.kernel, len(tokens.token), len(tokens.row))
        written = set()
        for i, ((use, size), operand, arg) in enumerate(zip(needs, case.operands, args, strict=True)):
            if use == "unused":
                assert case.kernel.startswith(("Heads", "Linear")) and size == 0
                continue
            want = page_bytes[operand.bytes] if isinstance(operand, Offset) else arg.nbytes
            assert (size, use == "in_pages") == (want, isinstance(operand, Offset)), (i, use, size, want)
            written |= {i} if use == "writes" else set()
        outputs = {1, 2} if case.kernel.startswith("RopeAngles") else {case.output} - {None}
        assert written == outputs


POISONS = [np.nan, np.inf, -np.inf]


def poisoned(case: Case, operand: int, t: int, change: Callable[[np.ndarray], None]) -> Case:
    """The case with token t's row of an operand changed; nobody checks its values."""
    operands = list(case.operands)
    array = operands[operand].array.copy()
    change(array[t].reshape(-1))
    operands[operand] = PerRow(array)
    return Case(case.kernel, case.tokens, operands, case.output, lambda got: None, case.rows)


def outputs_of(case: Case, got: np.ndarray) -> np.ndarray:
    """What rows hold, [count, N], as its readers see it: the scale and sum of a quantised group stand for the group."""
    if got.dtype != np.uint8:
        return got.reshape(len(got), -1)
    family, _, inside = case.kernel.rstrip(">").partition("<")
    parts = inside.split(",")
    width = int(parts[0]) * int(parts[2]) if family == "Attention" else int(parts[3 if family == "GateUp" else 1])
    q, scale, sums, correction = unpack_activations(got, width)
    unknown = np.isnan(scale)
    assert (np.isnan(sums) == unknown).all() and (correction[unknown] == 0).all()
    assert (q.reshape(*scale.shape, 32)[unknown] == 0).all()
    return np.repeat(scale, 32, axis=1)


@each_level
@pytest.mark.parametrize("poison", POISONS)
def test_what_is_not_finite_makes_its_group_nan_when_quantised(
    libraries: dict[str, Library], level: str, poison: float
) -> None:
    clean = quantize(96)
    for element in (32, 47, 48, 63):
        case = poisoned(clean, 0, 5, lambda row, element=element: row.__setitem__(element, poison))
        found = outputs_of(case, case.run(libraries[level]))
        want = outputs_of(clean, clean.run(libraries[level])).copy()
        want[5, 32:64] = np.nan
        assert np.array_equal(found, want, equal_nan=True)


# Kernels whose outputs a row's values enter, but for norms of other tokens' rows.
REACHED = [
    case
    for case in CASES
    if case.kernel.split("<")[0] in ("Linear", "GateUp", "Attention", "Norm", "SiluMul")
    and isinstance(case.operands[0], PerRow)
]


@each_level
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("case", REACHED, ids=case_name)
def test_a_token_with_nan_or_infinity_ends_in_nan_and_harms_no_other(
    libraries: dict[str, Library], case: Case, level: str, poison: float
) -> None:
    """Every output that the value enters is NaN or infinite, in that row only, down to its head."""
    t, quantised = 2, case.operands[0].array.dtype == np.uint8

    def spoil(row: np.ndarray) -> None:
        if quantised:  # a group as put() writes it
            k = int(case.kernel.split(",")[2])
            row[32:64] = 0
            row[k:].view(np.float32)[[1, k // 32 + 1]] = np.nan
            row[k:].view(np.int32)[2 * (k // 32) + 1] = 0
        else:
            row[1] = poison

    bad = poisoned(case, 0, t, spoil)
    clean, found = (outputs_of(c, c.run(libraries[level])) for c in (case, bad))
    others = np.arange(len(clean)) != t
    assert np.array_equal(found[others], clean[others], equal_nan=True)
    family, _, inside = case.kernel.partition("<")
    if family == "Attention":
        head = int(inside.split(",")[2])
        reached = found[t, :head]
        rest, rest_clean = found[t, head:], clean[t, head:]
        assert np.array_equal(rest, rest_clean)
    elif family in ("SiluMul", "Norm"):
        reached = found[t, 1:2]
    else:
        reached = found[t]
    if family == "Attention" and poison == -np.inf:
        return  # a weight of nothing beside others is a number
    assert not np.isfinite(reached).any(), reached


ATTENTIONS = [case for case in CASES if case.kernel.startswith("Attention")]


@each_level
@pytest.mark.parametrize("case", ATTENTIONS, ids=case_name)
def test_attention_reads_nothing_beyond_a_token_position(libraries: dict[str, Library], case: Case, level: str) -> None:
    """Prefill reads pages that hold later tokens, decode pages that hold leftovers: the bits are the same."""
    library, tokens = libraries[level], case.tokens
    prefill = case.run(library)
    h, kh, dh, kv, pt = (part.strip() for part in case.kernel.split("<")[1].split(",")[:5])
    shape = (kv, int(kh), int(dh), int(pt))
    key, value = case.operands[1].bytes, case.operands[2].bytes
    for t in range(0, len(tokens.token), 1 if len(tokens.token) < 64 else 23):
        pages = tokens.kv.copy()
        for p in range(tokens.position[t] + 1, tokens.page_table.shape[1] * int(pt)):
            page, inside = pages[tokens.page_table[tokens.slot[t], p // int(pt)]], p % int(pt)
            keys_of(page, key, *shape)[:, inside // 16, :, inside % 16] = np.nan if p % 2 else np.inf
            values_of(page, value, *shape)[:, inside] = np.nan if p % 2 else -np.inf
        step = Tokens(**{**vars(tokens.alone(t)), "kv": pages})
        out = case.fresh()[1][3][t]
        library.run(case.kernel, step, [case.operands[0].array[t], key, value, out])
        assert out.tobytes() == prefill[t].tobytes(), f"token {t} at position {tokens.position[t]}"


@each_level
def test_attention_does_not_depend_on_the_order_of_pages(libraries: dict[str, Library], level: str) -> None:
    first, second = (attention(6, 2, 32, "F16", 16, 0, "ToQuant", order=order) for order in (1, 2))
    assert (first.tokens.page_table != second.tokens.page_table).any()
    assert first.run(libraries[level]).tobytes() == second.run(libraries[level]).tobytes()
