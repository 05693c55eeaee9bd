"""What ran on the processor instead: the setting that allows it, and the counts."""

from __future__ import annotations

import threading

import pytest

from flare.errors import InputError
from flare.fallbacks import Fallback, Fallbacks
from flare.sources import configure


@pytest.mark.parametrize(
    ("variables", "options", "value", "source"),
    [
        ({}, {}, True, "default"),
        ({"FLARE_CPU_FALLBACK": "false"}, {}, False, "FLARE_CPU_FALLBACK"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "1"}, {}, False, "FLARE_REQUIRE_DEVICE_KERNELS"),
        (
            {"FLARE_REQUIRE_DEVICE_KERNELS": "true", "FLARE_CPU_FALLBACK": "1"},
            {},
            False,
            "FLARE_REQUIRE_DEVICE_KERNELS",
        ),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "0"}, {}, True, "default"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "0", "FLARE_CPU_FALLBACK": "0"}, {}, False, "FLARE_CPU_FALLBACK"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": ""}, {}, True, "default"),
        ({"FLARE_REQUIRE_DEVICE_KERNELS": "1"}, {"cpu_fallback": True}, True, "--cpu-fallback"),
        ({}, {"cpu_fallback": False}, False, "--cpu-fallback"),
    ],
)
def test_where_the_setting_comes_from(
    variables: dict[str, str], options: dict[str, object], value: bool, source: str
) -> None:
    configuration = configure(options, variables)
    assert configuration.values["cpu_fallback"] == (value, source) and configuration.warnings == []
    if not value:
        named = "--no-cpu-fallback" if source == "--cpu-fallback" else source
        assert configuration.place("cpu_fallback") == named
    assert configure({"core": "c", **options}, variables).runtime().cpu_fallback is value


def test_a_variable_that_is_no_switch_is_named() -> None:
    with pytest.raises(InputError) as caught:
        configure({}, {"FLARE_REQUIRE_DEVICE_KERNELS": "yes"})
    assert str(caught.value) == "FLARE_REQUIRE_DEVICE_KERNELS: 'yes' is not a switch: true or false"


def test_counts_by_cause(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    fallbacks.record("a")
    before = fallbacks.counts()
    assert fallbacks.since(before) == ()
    for cause in "bbcb":
        fallbacks.record(cause)
    assert fallbacks.since(before) == (Fallback("b", 3), Fallback("c", 1))
    assert fallbacks.events == (Fallback("a", 1), Fallback("b", 3), Fallback("c", 1))
    told = [(1, "a"), (1, "b"), (2, "b"), (1, "c")]
    assert [record.getMessage() for record in caplog.records] == [
        f"CPU FALLBACK ({count} so far for this cause): {cause}" for count, cause in told
    ]


def test_threads_count_together(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    threads = [threading.Thread(target=lambda: [fallbacks.record("a") for _ in range(1000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fallbacks.events == (Fallback("a", 4000),)
    assert len(caplog.records) == 12  # 1 to 2048
