"""The parts of benchmarks/ that figures depend on: the same bits for both sides, ratios the right way round."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks import clients, report, workload
from benchmarks.requantise import requantise


def row(engine: str, round_number: int, **figures: float) -> dict[str, object]:
    return {"engine": engine, "weights": "Q4_1", "round": round_number} | figures


def test_a_ratio_over_one_is_in_our_favour() -> None:
    """Rates: ours over theirs; seconds and bytes: theirs over ours; within a round, then the median and the range."""
    ours = [row("flare", 0, rate=200.0, load_s=0.1), row("flare", 1, rate=90.0, load_s=0.1)]
    theirs = [row("llama.cpp", 0, rate=100.0, load_s=0.4), row("llama.cpp", 1, rate=30.0, load_s=0.2)]
    assert report.ratio(ours, theirs, "rate", smaller_is_better=False) == "**2.50** (2.00-3.00)"
    assert report.ratio(ours, theirs, "load_s", smaller_is_better=True) == "**3.00** (2.00-4.00)"


def test_figures_replace_only_what_stands_between_the_markers(tmp_path: Path) -> None:
    document = tmp_path / "figures.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(document, "new")
    assert document.read_text() == f"before\n{report.BEGIN}\n\nnew\n\n{report.END}\nafter\n"
    document.write_text(f"before\n{report.END}\n{report.BEGIN}\n")
    with pytest.raises(ValueError, match="no lines"):
        report.write(document, "new")


def test_the_repository_s_document_has_the_markers(repository: Path, tmp_path: Path) -> None:
    copy = tmp_path / "performance.md"
    copy.write_text((repository / "docs/performance.md").read_text())
    report.write(copy, "figures")
    assert "figures" in copy.read_text()


def test_a_run_whose_requests_fail_gives_no_figures() -> None:
    good = clients.Seen(started=0.0, texts=[1.0, 1.5, 2.0], usage={"completion_tokens": 3})
    bad = clients.Seen(started=0.0, error="HTTP 500: no")
    with pytest.raises(RuntimeError, match="1 of 2 requests failed.*HTTP 500"):
        clients.summary([good, bad], wall=2.0, new_tokens=3)
    figures = clients.summary([good, good], wall=2.0, new_tokens=3)
    assert (figures["tokens_s"], figures["ttft_s"], figures["gap_ms"]) == (3.0, 1.0, 500.0)


def test_prompts_are_compared_within_a_round() -> None:
    rows = [
        row(engine, number, seconds=seconds, messages=3, tokens=30)
        for engine, times in (("flare", (0.1, 0.2)), ("transformers", (0.2, 0.8)))
        for number, seconds in enumerate(times)
    ]
    assert report.prompts(rows).splitlines()[-1] == "| 3 | 30 | 150 | 500 | **3.00** (2.00-4.00) |"


def test_masks_make_the_core_s_own_decode_steps_longer() -> None:
    figures = {"form": "any object", "compile_ms": 1.25, "slowest_us": 800.0}
    steps = {"step_us": 2000.0, "masked_step_us": 2050.0}
    rows = [figures | steps | {"vocabulary": 10, "tables_s": 0.25, "token_us": us} for us in (10.0, 50.0, 60.0)]
    rows.append(figures | {"vocabulary": 30, "tables_s": 1.5, "token_us": 70.0})
    assert report.masks(rows).splitlines()[2:] == [
        "| any object | 10 | 1.2 | 50 | 800 | 2.5% |",
        "| any object | 30 | 1.2 | 70 | 800 |  |",
        "",
        "Making a vocabulary's tables, once, took by its size: 10: 0.25 s, 30: 1.50 s.",
    ]


def test_sampling_s_medians_stand_under_their_vocabulary() -> None:
    rows = [
        {"vocabulary": size, "setting": setting, "round": number, "us": us * size + number}
        for number in range(3)
        for size in (10, 20)
        for setting, us in (("greedy", 1), ("score", 2))
    ]
    assert report.sampling(rows).splitlines() == [
        "| | 10 tokens, µs | 20 tokens, µs |",
        "|---|---:|---:|",
        "| greedy | 11 | 21 |",
        "| score | 21 | 41 |",
    ]


def test_short_answers_show() -> None:
    short = clients.Seen(started=0.0, texts=[1.0], usage={"completion_tokens": 1})
    assert clients.summary([short], wall=1.0, new_tokens=4)["length_share"] == 0.25


def test_both_sides_run_the_same_tokens() -> None:
    assert workload.prompt(512, seed=2) == workload.prompt(512, seed=2)
    assert workload.prompt(64, seed=100) != workload.prompt(64, seed=101)


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_requantised_weights_are_the_nearest_in_the_new_format(tmp_path: Path, name: str) -> None:
    """4-bit tensors become `name` of the values that they stand for; others, and the metadata, stay as they are."""
    values = np.random.default_rng(0).standard_normal((4, 64), dtype=np.float32)
    source, destination = tmp_path / "source.gguf", tmp_path / "destination.gguf"
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_block_count(2)
    writer.add_token_list(["a", "b", "c"])
    narrow = gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("narrow", narrow, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("plain", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    requantise(source, name, destination)

    reader = gguf.GGUFReader(destination)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert tensors["narrow"].tensor_type.name == name.upper()
    stood_for = gguf.dequantize(narrow, gguf.GGMLQuantizationType.Q4_1)
    found = gguf.dequantize(tensors["narrow"].data, tensors["narrow"].tensor_type)
    steps = 127 if name == "q8_0" else 8
    largest = np.abs(stood_for.reshape(4, 2, 32)).max(axis=2)[..., None]
    assert np.all(np.abs(found - stood_for).reshape(4, 2, 32) <= 1.01 * largest / steps)
    assert np.array_equal(tensors["plain"].data, values)
    assert reader.get_field("llama.block_count").contents() == 2
    assert reader.get_field("tokenizer.ggml.tokens").contents() == ["a", "b", "c"]


def test_a_server_that_was_not_measured_is_named() -> None:
    figures = {"weights": "Q4_1", "round": 0, "ready_s": 1.0, "token_s": 1.0, "pss_mb": 1.0}
    ours, theirs = ({"server": name} | figures for name in ("flare", "transformers serve"))
    assert "`transformers serve` was not measured" in report.cold_start([ours])
    assert "not measured" not in report.cold_start([ours, theirs])
