"""Times the rows that the planner's policy could have, on a GPU, through the library's own plans.

    go run ./internal/cmd/policy -candidates > candidates.json
    python bench/tune.py candidates.json h100 bench/results/DEVICE-COMMIT.jsonl --ops softmax_forward
    cd internal/policy && go run ../cmd/policy -measurements ../../bench/results/DEVICE-COMMIT.jsonl

Each row that fits a shape is forced: GANDER_TUNE names a file with the row by which the library plans. Its
result is compared with float64. It is timed in turns with what the policy takes and with a plain kernel of
the same traffic. A line of the output is one row at one shape. The last command brings them into the policy.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

DEVICES = ("h100", "h200", "other", "other-fast")
# Operators of the policy, with the benchmark's name and gander.explain's, if it has one.
OPERATORS = {
    "softmax_forward": ("softmax_forward", "softmax"),
    "softmax_backward": ("softmax_backward", "softmax_bwd"),
    "rmsnorm_forward": ("rmsnorm_forward", "rmsnorm"),
    "rmsnorm_backward": ("rmsnorm_backward", "rmsnorm_bwd"),
    "rmsnorm_backward_dx": ("rmsnorm_backward_dx", None),
    "cross_entropy_forward": ("cross_entropy_forward", "cross_entropy"),
    "cross_entropy_forward_dx": ("cross_entropy_loss_gradient", "cross_entropy_fwd_dx"),
    "cross_entropy_backward": ("cross_entropy_backward", "cross_entropy_bwd"),
    "general_cross_entropy_forward": ("cross_entropy_options_forward", None),
    "general_cross_entropy_forward_dx": ("cross_entropy_options_loss_gradient", None),
    "soft_cross_entropy_forward": ("cross_entropy_probabilities_forward", None),
    "token_statistics_forward": ("token_statistics_forward", "token_statistics"),
    "all_token_statistics_forward": ("token_statistics_all_forward", None),
    "layernorm_forward": ("layernorm_forward", "layernorm"),
    "layernorm_backward": ("layernorm_backward", "layernorm_bwd"),
    "norm_forward": ("rmsnorm_residual_forward", None),
    "rmsnorm_residual_backward": ("rmsnorm_residual_backward", None),
}
SHAPES = [(32768, 1 << k) for k in range(8, 17)] + [(16384, 131072), (8192, 262144)]


def shape(text):
    m, n = text.split("x")
    return int(m), int(n)


def arguments(argv):
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("candidates", type=Path, help="what `policy -candidates` printed")
    p.add_argument("device", choices=DEVICES, help="the policy that the measurements are for")
    p.add_argument("out", type=Path, help="a file of measurements, to which lines are added")
    p.add_argument("--ops", nargs="*", default=list(OPERATORS), choices=list(OPERATORS))
    p.add_argument("--dtypes", nargs="*", default=["bfloat16"], choices=["float16", "bfloat16", "float32"])
    p.add_argument("--shapes", nargs="*", default=SHAPES, type=shape, help="such as 32768x1024")
    p.add_argument(
        "--weight", choices=["float16", "bfloat16", "float32"], help="of norms; the rows' if not given"
    )
    p.add_argument("--mixed-offsets", action="store_true", help="the first operand begins an element later")
    p.add_argument("--row-file", type=Path, help=argparse.SUPPRESS)  # of a process that main has started
    p.add_argument("--seconds", type=float, default=1.0, help="for the rows of one shape")
    return p.parse_args(argv)


def layout_of(n, itemsize, mixed_offsets):
    """Where compact rows lie. Those that are not whole 16-byte vectors long still have the same offset."""
    if mixed_offsets:
        return "mixed-offsets"
    return "aligned" if n * itemsize % 16 == 0 else "same-offset"


def vectors_of(n, itemsize, layout):
    """16-byte vectors that a row may touch, as the policy counts them."""
    elements = 16 // itemsize
    return -(-n // elements) if layout == "aligned" else -(-(n + elements - 1) // elements)


def rows_for(candidates, operator, dtype, layout, vectors):
    """The candidates that are meant for rows of this length."""
    rows = candidates.get(f"{operator} {dtype} {layout}", [])
    return [r["row"] for r in rows if r["over"] < vectors and (r["up_to"] == 0 or vectors <= r["up_to"])]


def policy_row(explanation):
    """The policy's row in the words of gander.explain, or ""."""
    rows = (s.removeprefix("policy: ") for s in explanation.splitlines() if s.startswith("policy: "))
    return next(rows, "")


def shifted(tensor):
    """The same numbers, one element after a 16-byte boundary."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view_as(tensor).copy_(tensor)


def measure(options, candidates, row_file, operator, dtype, m, n, where="cuda"):
    """The records of one operator at one shape."""
    import gander
    import torch
    from gander_bench import sections
    from gander_bench.cases import ALL, DTYPES, provider

    name, explained = OPERATORS[operator]
    case, itemsize = ALL[name], DTYPES[dtype].itemsize
    layout = layout_of(n, itemsize, options.mixed_offsets)
    torch.manual_seed(0)
    inputs = case.inputs(m, n, DTYPES[dtype], where)
    if options.weight:
        inputs = list(inputs)
        for position in case.shared:
            inputs[position] = inputs[position].to(DTYPES[options.weight])
    aligned = inputs  # for the plain kernel, which moves whole vectors
    if options.mixed_offsets:
        inputs = (shifted(inputs[0]), *inputs[1:])
    usual = provider("gander").operators[name](*inputs)

    def by(row):
        def call():
            row_file.write_text(row)
            return usual()

        return call

    calls, results = {}, {}
    for row in ["", *rows_for(candidates, operator, dtype, layout, vectors_of(n, itemsize, layout))]:
        try:
            off = sections._distance(name, inputs, by(row)(), m)
        except NotImplementedError:
            if row == "":
                raise
            continue  # the row cannot serve the shape on this device
        if not off < sections.WRONG[inputs[0].dtype]:
            raise ArithmeticError(f"{operator} {dtype} {m} x {n} by {row!r}: {off:.1e} off")
        calls[row], results[row] = by(row), {}
    row_file.write_text("")
    known = explained is not None and layout != "mixed-offsets"
    policy = policy_row(gander.explain(explained, inputs[0])) if known else ""
    choice = sections.Options(providers=(), seconds=options.seconds)
    figures = sections._beside_the_limit(choice, case.traffic, aligned, calls, results)
    limit = figures.get("limit", {}).get("us", 0)
    point = {"device": options.device, "operator": operator, "dtype": dtype, "layout": layout, "m": m, "n": n}
    if options.weight:
        point["weight"] = options.weight
    for row, result in results.items():
        yield point | {
            "row": row,
            "policy": policy if row == "" else "",
            "us": result["us"],
            "low": result["low"],
            "high": result["high"],
            "limit_us": limit,
        }


def check_that_rows_are_forced(row_file):
    """Raises RuntimeError if the library does not plan by the row in the file."""
    import gander

    row = "auto - - - registers 512x8"
    row_file.write_text(row)
    explanation = gander.explain("softmax", shape=(4096, 4096), dtype="bfloat16", device="h100")
    row_file.write_text("")
    if policy_row(explanation) != row:
        reason = f"the library does not read {row_file}: GANDER_TUNE must be set when Python starts"
        raise RuntimeError(reason)


def run(options, row_file):
    """Measures all shapes. The environment of this process names the row file."""
    import torch
    from gander_bench import records

    check_that_rows_are_forced(row_file)
    candidates = json.loads(options.candidates.read_text())
    with options.out.open("a") as out:
        for m, n in options.shapes:
            for dtype in options.dtypes:
                for operator in options.ops:
                    try:
                        found = list(measure(options, candidates, row_file, operator, dtype, m, n))
                    except torch.OutOfMemoryError:
                        print(f"{operator} {dtype} {m} x {n}: out of memory", flush=True)
                        continue
                    environment = records.environment()
                    for record in found:
                        out.write(json.dumps(record | {"environment": environment}) + "\n")
                    out.flush()
                    usual = next(r["us"] for r in found if r["row"] == "")
                    best = min(found, key=lambda r: r["us"])
                    print(
                        f"{operator:26} {dtype:9} {m:6} x {n:<8} {usual:9.2f} us, best {best['us']:9.2f} "
                        f"by {best['row'] or 'the policy'}, of {len(found)}",
                        flush=True,
                    )
                    torch.cuda.empty_cache()


def main(argv=None):
    options = arguments(argv)
    if options.row_file is not None:
        run(options, options.row_file)
        return 0
    # Go sees the environment with which its process has started. So another process gets the variable.
    with tempfile.TemporaryDirectory() as folder:
        row_file = Path(folder, "row")
        row_file.write_text("")
        arguments_again = sys.argv[1:] if argv is None else argv
        again = [sys.executable, __file__, *arguments_again, "--row-file", str(row_file)]
        return subprocess.run(again, env=os.environ | {"GANDER_TUNE": str(row_file)}).returncode


if __name__ == "__main__":
    sys.exit(main())
