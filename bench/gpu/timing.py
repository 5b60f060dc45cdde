"""Device time of a call, its scratch, and the copy rate. README.md says how and why."""

import math
import statistics

import torch

REPLAYS = 21
GRAPH_MS = 0.5  # one replay lasts at least this long: an event is good to about a microsecond
MOST_CALLS = 256  # of one graph
SLEEP_CYCLES = 2_000_000  # about a millisecond, in which the host fills the queue
COPY_BYTES = 4 << 30


def input_sets(bytes_per_set: int) -> int:
    """How many sets of inputs to rotate among, so that none is found in L2: two at least, three times L2 in all."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, math.ceil(3 * cache / bytes_per_set))


def result_bytes(result) -> int:
    if isinstance(result, torch.Tensor):
        return result.untyped_storage().nbytes()
    return sum(result_bytes(part) for part in result) if isinstance(result, (list, tuple)) else 0


def scratch_bytes(call) -> int:
    """Most device memory that a call holds beside its inputs and results."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - result_bytes(result))


def elapsed_ms(run, repeats: int) -> list[float]:
    """Times of `repeats` runs that follow each other on the device without a gap."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in marks]


def estimate_ms(calls, rounds: int = 1) -> float:
    """Mean of one call, plain launches: good enough to compare tile sizes."""

    def run():
        for call in calls:
            call()

    run()
    return statistics.median(elapsed_ms(run, rounds)) / len(calls)


def capture(calls, count: int):
    """One graph of `count` calls, in rotation."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            calls[i % len(calls)]()
    return graph


def median_ms(calls) -> float:
    """Median over graph replays of the mean time of a call. `calls`: the same work, one for every set of inputs."""
    estimate = max(estimate_ms(calls), 1e-3)
    rounds = max(1, min(math.ceil(GRAPH_MS / estimate / len(calls)), MOST_CALLS // len(calls)))
    graph = capture(calls, rounds * len(calls))
    for _ in range(3):
        graph.replay()
    return statistics.median(elapsed_ms(graph.replay, REPLAYS)) / (rounds * len(calls))


def launch_ms(call) -> float:
    """Median of a graph with the call alone, its launch included."""
    call()
    graph = capture([call], 1)
    for _ in range(3):
        graph.replay()
    return statistics.median(elapsed_ms(graph.replay, REPLAYS))


def copy_rate() -> float:
    """Bytes a second that a large copy on the device reads and writes together.

    Not in a graph, whose copy nodes run at two thirds of the rate.
    """
    source = torch.empty(COPY_BYTES // 4, dtype=torch.int32, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(11):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * COPY_BYTES / (statistics.median(times) / 1e3)
