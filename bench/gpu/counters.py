"""Hardware counters of the score step, naive PyTorch, Triton and ours beside each other (needs ncu and a GPU that shows
its counters).

    python3 bench/gpu/counters.py --lib build/release/cuda/libdropkv_cuda.so [--tokens 16384] [--rows 32]

Every competitor runs once, in a process of its own under ncu. Counts are sums over its kernels, shares are weighted by
the kernels' time.
"""

import argparse
import csv
import io
import subprocess
import sys

COMPETITORS = ("naive", "triton", "ours", "ours given")
TIME = "gpu__time_duration.sum"
COUNTS = {"smsp__inst_executed.sum": "instructions", "dram__bytes.sum": "DRAM bytes"}
SHARES = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "DRAM bandwidth %",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor pipe %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "SM %",
}


def run_one(competitor: str, args: argparse.Namespace) -> None:
    """The profiled process: warm up, then one call between the profiler's marks."""
    import torch

    import library as abi
    from cases import Inputs, Shape, generator_of
    from ours import Ours
    from peers import naive
    from peers.triton_score import TritonScore

    inputs = Inputs(Shape(args.tokens, args.rows), generator_of(1))
    if competitor == "naive":
        (sequence,) = inputs.sequences()
        call = lambda: naive.dropkv(*sequence)  # noqa: E731
    elif competitor == "triton":
        score = TritonScore(inputs.shape, [inputs], False)
        call = lambda: score(inputs)  # noqa: E731
    else:
        ours = Ours(abi.Library(args.lib), inputs.shape, [inputs], given=competitor == "ours given")
        (call,) = ours.score()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStart()
    call()
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def profile(competitor: str, args: argparse.Namespace) -> dict[str, float]:
    metrics = ",".join([TIME, *COUNTS, *SHARES])
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", metrics, sys.executable, __file__, "--one", competitor, "--tokens", str(args.tokens)]
    command += ["--rows", str(args.rows), "--lib", args.lib]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    kernels: dict[str, dict[str, float]] = {}
    lines = [line for line in text.splitlines() if line.startswith('"')]
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        kernels.setdefault(row["ID"], {})[row["Metric Name"]] = float(row["Metric Value"].replace(",", ""))
    time = sum(kernel[TIME] for kernel in kernels.values())
    result = {"kernels": float(len(kernels)), "us": time / 1e3}
    for metric, name in COUNTS.items():
        result[name] = sum(kernel[metric] for kernel in kernels.values())
    for metric, name in SHARES.items():
        result[name] = sum(kernel[metric] * kernel[TIME] for kernel in kernels.values()) / time
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lib", required=True, help="libdropkv_cuda.so")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--one", choices=COMPETITORS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        run_one(args.one, args)
        return
    results = {competitor: profile(competitor, args) for competitor in COMPETITORS}
    names = list(next(iter(results.values())))
    print("| n = " + str(args.tokens) + ", w = " + str(args.rows) + " | " + " | ".join(names) + " |")
    print("| --- " * (len(names) + 1) + "|")
    for competitor, values in results.items():
        print("| " + competitor + " | " + " | ".join(f"{values[name]:.4g}" for name in names) + " |")


if __name__ == "__main__":
    main()
