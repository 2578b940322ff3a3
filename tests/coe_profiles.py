"""A small profile of a collaboration, as ``greenroom coe profile`` writes them."""

from __future__ import annotations

from greenroom.core.coe_profile import (
    FORMAT,
    ArchitectureCosts,
    ArchitectureProfile,
    BatchTimes,
    CoeProfile,
    ExecutorsProfile,
    MemoryTrial,
)

MACHINE = "a processor, 2 cores"


def times(request_ms: float, batch_ms: float, most: int) -> BatchTimes:
    sizes = (1, 2, 4, 8)
    return BatchTimes(
        ms_by_batch={size: batch_ms + request_ms * size for size in sizes},
        request_ms=request_ms,
        batch_ms=batch_ms,
        most=most,
    )


def costs(request_ms: float, load_ms: float, most: int = 8) -> ArchitectureCosts:
    """Two executors side by side take twice as long; a batch of n has 1000 n + 500 bytes."""
    return ArchitectureCosts(
        load_ms=load_ms,
        bytes_by_batch={size: 1000 * size + 500 for size in (1, 2, 4, 8)},
        by_executors={1: times(request_ms, 3.0, most), 2: times(2 * request_ms, 6.0, most)},
    )


def trial(residents: int, expert_bytes: int) -> MemoryTrial:
    return MemoryTrial(
        residents=residents,
        expert_bytes=expert_bytes,
        per_s=100.0,
        window=(1, 3),
        drawn=2,
        per_s_by_residents={1: 50.0, 2: 90.0, 3: 100.0},
    )


def small_profile() -> CoeProfile:
    return CoeProfile(
        format=FORMAT,
        version=1,
        collaboration="board",
        machine=MACHINE,
        architectures={
            "small": ArchitectureProfile(model_class="ResNetForImageClassification", record_bytes=10_000),
            "large": ArchitectureProfile(model_class="YolosForObjectDetection", record_bytes=20_000),
        },
        experts={"resistor": "small", "turned": "small", "chip": "large"},
        usage={"resistor": 0.75, "turned": 0.625, "chip": 0.25},
        kinds={
            "cpu": ExecutorsProfile(
                executors=2,
                memory_bytes=80_000,
                scheduling="coserve",
                threads_by_executors={1: 2, 2: 1},
                architectures={"small": costs(1.0, 5.0), "large": costs(4.0, 9.0, most=4)},
                trials={1: trial(3, 40_000), 2: trial(2, 40_000)},
            )
        },
    )
