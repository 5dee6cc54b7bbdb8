"""Searches the kernels' launch shapes on a GPU, without the library: every variant that fits a shape is launched
through the driver, checked against torch in float32, and timed against plain kernels of the same traffic.

    python3 bench/tune.py TABLE.json IMAGES OUT.jsonl [--ops ...] [--dtypes ...] [--shapes MxN ...]

TABLE.json is what `go run ./internal/cmd/instantiate -json` prints. IMAGES holds <family>.sm_90.fatbin and
ceiling.fatbin, made by `nvcc -fatbin -arch=sm_90 python/gander/bench/ceiling.cu`. Each line of OUT is one candidate at
one point: microseconds (median), the limit's microseconds, their ratio.
"""

import argparse
import ctypes as ct
import itertools
import json
import pathlib
import struct
import sys

import torch

cuda = ct.CDLL("libcuda.so.1")
SMS = torch.cuda.get_device_properties(0).multi_processor_count
TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
CODES = {"float16": 0, "bfloat16": 1, "float32": 2, "int64": 5}

WAVES = (1, 2, 4, 8, 16, 64, 128)  # CTAs per SM that rows are split for


def ceil(a, b):
    return -(-a // b)


def check(code, what):
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}")


class Attribute(ct.Structure):
    _fields_ = [("id", ct.c_int), ("pad", ct.c_int), ("value", ct.c_uint * 16)]


class Config(ct.Structure):
    _fields_ = [
        ("grid", ct.c_uint * 3),
        ("block", ct.c_uint * 3),
        ("shared", ct.c_uint),
        ("stream", ct.c_void_p),
        ("attributes", ct.POINTER(Attribute)),
        ("count", ct.c_uint),
    ]


def config(grid, threads, cluster=1, shared=0, dependent=False, cooperative=False):
    c = Config((grid // cluster, cluster, 1), (threads, 1, 1), shared, None, None, 0)
    attributes = []
    if cluster > 1:
        attributes.append(Attribute(4, 0, (1, cluster, 1)))  # along y: blockIdx.x counts them
    if cooperative:  # all CTAs resident at once
        attributes.append(Attribute(2, 0, (1,)))
    elif dependent:  # programmatic stream serialization: start while the launch before ends
        attributes.append(Attribute(6, 0, (1,)))
    if attributes:
        c._keep = (Attribute * len(attributes))(*attributes)
        c.attributes, c.count = c._keep, len(attributes)
    return c


class Module:
    """The kernels of a family; its images may be several, compiled side by side."""

    def __init__(self, images, family):
        self.handles, self.functions = [], {}
        for f in sorted(images.glob(f"{family}.*fatbin")):
            h = ct.c_void_p()
            check(cuda.cuModuleLoadData(ct.byref(h), f.read_bytes()), f)
            self.handles.append(h)

    def get(self, name):
        if name not in self.functions:
            f = ct.c_void_p()
            for h in self.handles:
                if cuda.cuModuleGetFunction(ct.byref(f), h, name.encode()) == 0:
                    break
            else:
                raise RuntimeError(name)
            static = ct.c_int()
            check(cuda.cuFuncGetAttribute(ct.byref(static), 1, f), name)
            check(cuda.cuFuncSetAttribute(f, 8, 227 * 1024 - static.value), name)
            check(cuda.cuFuncSetAttribute(f, 14, 1), name)
            self.functions[name] = f
        return self.functions[name]


def launch(f, c, args):
    c.stream = torch.cuda.current_stream().cuda_stream
    params = (ct.c_void_p * len(args))(*[ct.addressof(a) for a in args])
    check(cuda.cuLaunchKernelEx(ct.byref(c), f, params, None), "launch")


class Timer:
    def __init__(self):
        self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
        self.a, self.b = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, run, repeats):
        for _ in range(2):
            run()
        times = []
        for _ in range(repeats):
            self.flush.zero_()
            self.a.record()
            run()
            self.b.record()
            self.b.synchronize()
            times.append(self.a.elapsed_time(self.b) * 1e3)
        return sorted(times)[len(times) // 2]


class Tuner:
    def __init__(self, table, images, out):
        data = json.loads(pathlib.Path(table).read_text())
        self.variants, self.layouts = data["variants"], data["args"]
        self.images, self.modules, self.out = pathlib.Path(images), {}, pathlib.Path(out)
        self.timer, self.limits = Timer(), {}
        self.scratch = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")

    def module(self, name):
        if name not in self.modules:
            self.modules[name] = Module(self.images, name)
        return self.modules[name]

    def pack(self, kind, **values):
        fields = self.layouts[kind]
        size = max(f["Offset"] + f["Size"] for f in fields)
        raw = bytearray((size + 7) // 8 * 8)
        for f in fields:
            v = values.pop(f["Name"], 0)
            code = "f" if f["Float"] else {4: "i", 8: "q"}[f["Size"]]
            struct.pack_into("<" + code, raw, f["Offset"], v)
        if values:
            raise KeyError(f"{kind} has no {list(values)}")
        return (ct.c_char * len(raw)).from_buffer(raw)

    def limit(self, mix, size, bufs, repeats):
        key = mix, size
        if key not in self.limits:
            n = size // 16
            best = 1e9
            args = [ct.c_void_p(b.data_ptr()) for b in bufs] + [ct.c_int64(n)]
            for u in (1, 2, 4, 8):
                f = self.module("ceiling").get(f"{mix}_{u}")
                for t in (128, 256, 512, 1024):
                    if u * t > 4096:  # more registers than there are
                        continue
                    c = config((n + t * u - 1) // (t * u), t)
                    best = min(best, self.timer(lambda c=c, f=f: launch(f, c, args), max(5, repeats // 2)))
            self.limits[key] = best
        return self.limits[key]

    def candidates(self, op, dtype, m, n):
        """Launch lists [(variant, grid, cluster, shared)] with the arguments that go with them."""
        size = TYPES[dtype].itemsize
        general = n * size % 16 != 0
        e = 16 // size
        nv = -(-n // e) if not general else -(-(n + e - 1) // e)
        mine = [v for v in self.variants if v["Family"].endswith(dtype) and v["Family"][:4] == op[:4]]

        def of(op, shape):
            return [v for v in mine if v["Op"] == op and v["Shape"] == shape and v["General"] == general]

        dw = op == "rmsnorm_backward"
        if not dw:
            for v in of(op, "rows"):
                cap = v["RowThreads"] * v["Vectors"]
                for c in range(2, 17) if v["Cluster"] else (1,):
                    if (
                        cap * c < nv
                        or (cap * c >= (2 * nv if c > 2 else 4 * nv) and cap > 8)
                        or (c > 2 and cap * (c - 1) >= nv)
                    ):
                        continue
                    rows = v["Threads"] // v["RowThreads"]
                    grid = -(-m // rows) * c
                    yield [(v, grid, c, 0)], {"chunk": 1 << 27, "splits": 1}
            for v in of(op, "staged"):
                cap = v["RowThreads"] * v["Vectors"]
                for c in range(2, 17) if v["Cluster"] else (1,):
                    if not cap * (c - 1) < nv <= cap * c or cap * c >= 4 * nv:
                        continue
                    # An SM may do better with fewer CTAs than its registers hold.
                    for shared in sorted({cap * 16, max(cap * 16, (227 << 10) // v["Resident"] + 128)}):
                        yield [(v, m * c, c, shared)], {"chunk": 1 << 27, "splits": 1, "shared": shared}
            yield from self.held(of, mine, op, m, nv, 2 if op.endswith("backward") else 1)
            yield from self.teams(of, mine, op, nv, 2 if op.endswith("backward") else 1, [])
            for v in of(op, "loop"):
                cap = v["RowThreads"] * v["Vectors"]
                if nv <= cap < 2 * nv:
                    for resident in (2, 4, 6, 8, 10, 12, 16):
                        yield (
                            [(v, min(SMS * resident, -(-m // (v["Threads"] // v["RowThreads"]))), 1, 0)],
                            {"chunk": 1 << 27, "splits": 1, "resident": resident},
                        )
            reduces = op != "cross_entropy_backward"
            maps = op != "cross_entropy_forward"
            apply = of(op, "apply")
            for partial, waves in itertools.product(of(op, "partial") if reduces else [None], WAVES):
                want = max(1, -(-SMS * waves // m))
                chunk = max(ceil(ceil(nv, want), 1024) * 1024, 1024)
                if not reduces:
                    chunk = 1024 * waves
                splits = -(-nv // chunk)
                steps = []
                if reduces:
                    if splits == 1 and waves > 1:
                        continue
                    steps.append((partial, m * splits, 1, 0))
                if maps or splits > 1:
                    steps.append((apply[0], m * splits if maps else m, 1, 0))
                if nv >= 512 and (m < 1024 or not maps or not reduces):
                    yield steps, {"chunk": chunk, "splits": splits, "waves": waves}
            return
        last = [v for v in mine if v["Op"] == "weight_gradient"]
        v = last[2 if n > 32768 else n > 2048]
        finish = (v, ceil(n, v["Threads"] // v["RowThreads"]), 1, 0)
        for v in of(op, "lanes"):
            if v["RowThreads"] * v["Vectors"] >= nv:
                for resident in (1, 2, 3, 4):
                    p = min(SMS * resident, -(-m // (v["Threads"] // v["RowThreads"])))
                    if general:  # rows of a CTA lie alike
                        p = max(p // e, 1) * e
                    yield [(v, p, 1, v["Shared"]), finish], {"partials": p, "resident": resident}
        yield from self.teams(of, mine, op, nv, 2, [finish])
        yield from self.rings(of, op, m, nv, finish, e - 1 if general else 0)
        tiles = -(-n // (256 * e))
        for v, waves in itertools.product(of(op, "columns"), (2, 4, 8)):
            blocks = min(max(SMS * waves // tiles, 1), m)
            want = max(1, -(-SMS * 4 // m))
            chunk = max(ceil(ceil(nv, want), 1024) * 1024, 1024)
            splits = -(-nv // chunk)
            yield (
                [(of(op, "partial")[0], m * splits, 1, 0), (v, tiles * blocks, 1, 0), finish],
                {"partials": blocks, "chunk": chunk, "splits": splits},
            )

    @staticmethod
    def held(of, mine, op, m, nv, inputs):
        for v in of(op, "held"):
            if m > 16 or nv < 16384:
                continue
            clear = next(c for c in mine if c["Op"].endswith("_clear"))
            each = v["Resident"]  # CTAs on an SM
            chunk = ceil(ceil(nv, SMS * each // m), 8) * 8
            splits = ceil(nv, chunk)
            tile = inputs * v["RowThreads"] * v["Vectors"] * 16
            room = (228 << 10) // each - 1792  # less what planner.held in ops/plan.go leaves aside
            most = min(ceil(chunk * inputs * 16, tile), room // tile, 16)
            for lag in sorted({most, (most + 1) // 2}):
                yield (
                    [(clear, ceil(m * splits, 256), 1, 0), (v, m * splits, 1, lag * tile)],
                    {"chunk": chunk, "splits": splits, "lag": lag},
                )

    @staticmethod
    def teams(of, mine, op, nv, inputs, then):
        for v in of(op, "team"):
            cap = v["RowThreads"] * v["Vectors"]
            if cap * SMS < nv or cap * SMS >= 4 * nv:
                continue
            clear = next(c for c in mine if c["Op"].endswith("_clear"))
            together = v["Together"]
            stage = inputs * together * -(-nv // SMS) * 16
            most = min(((227 - 12) << 10) // stage, 56)
            for stages in sorted({6, 13, 20, 27, 40, most}):
                if stages > most:
                    continue
                for lag in sorted({max(1, min(stages - k, 31)) for k in (2, 4, 8, 12, 16)}):
                    words = SMS * 64 * together
                    yield (
                        [(clear, -(-words // 256), 1, 0), (v, SMS, 1, stages * stage), *then],
                        {"partials": v["Groups"], "stages": stages, "splits": SMS * together, "lag": lag},
                    )

    def rings(self, of, op, m, nv, finish, pieces):
        for v in of(op, "ring"):
            cap = v["RowThreads"] * v["Vectors"]
            for c in range(2, 17) if v["Cluster"] else (1,):
                if cap * c < nv or cap * c >= 4 * nv or (c & (c - 1) and cap * (c - 1) >= nv):
                    continue
                for resident, stages in itertools.product(range(1, v["Resident"] + 2), (2, 3, 4, 6, 8)):
                    shared = stages * 2 * (cap + v["General"]) * 16
                    if shared * resident > 220 << 10:
                        continue
                    groups = SMS * resident
                    if c > 1:
                        count = ct.c_int()
                        f = self.module(v["Family"]).get(v["Symbol"])
                        conf = config(c * 1024, v["Threads"], c, shared)
                        check(cuda.cuOccupancyMaxActiveClusters(ct.byref(count), f, ct.byref(conf)), "occupancy")
                        if count.value < resident * SMS // (c + 1):  # as many as other values of `resident` stand for
                            continue
                        groups = min(count.value, resident * SMS // c)
                    groups = min(groups, m)
                    yield (
                        [(v, groups * c, c, shared), finish],
                        {"partials": groups + pieces, "stages": stages, "resident": resident},
                    )

    def point(self, op, dtype, m, n, repeats):
        t = TYPES[dtype]
        g = torch.Generator(device="cuda").manual_seed(1)
        numel = m * n
        need = numel * t.itemsize
        one = torch.randn(1 << 22, device="cuda", generator=g).to(t)

        def fill(seed):
            x = torch.empty(numel, device="cuda", dtype=t)
            for i in range(0, numel, one.numel()):
                k = min(one.numel(), numel - i)
                x[i : i + k] = one[:k].roll(seed + i // one.numel() * 17)
            return x.view(m, n)

        a = fill(0)
        two = op in ("softmax_backward", "rmsnorm_backward")
        b = fill(5) if two else a
        if op == "softmax_backward":
            for i in range(0, m, 4096):
                b[i : i + 4096] = torch.softmax(b[i : i + 4096].float(), -1).to(t)
        y = torch.empty_like(a)
        mix = {"cross_entropy_forward": "r"}.get(op, "rrw" if two else "rw")
        limit = self.limit(mix, need // 16 * 16, (a, b, y), repeats)
        w = torch.randn(n, device="cuda", dtype=t)
        rstd = torch.empty(m, device="cuda")
        for i in range(0, m, 4096):
            rstd[i : i + 4096] = a[i : i + 4096].float().square().mean(-1).add(1e-6).rsqrt()
        target = torch.randint(n, (m,), device="cuda")
        stats = torch.empty(6, max(m, n), device="cuda")

        def off(bytes):
            return self.scratch.data_ptr() + bytes

        base = dict(
            a=a.data_ptr(),
            b=b.data_ptr(),
            y=y.data_ptr(),
            a_stride=n,
            b_stride=n,
            y_stride=n,
            m=m,
            n=n,
            b_type=CODES[dtype],
            y_type=CODES[dtype],
            partial=off(0),
        )
        kind = "SoftmaxArgs"
        if op.startswith("rmsnorm"):
            kind = "RMSNormArgs"
            dw = torch.empty(n, device="cuda", dtype=t)
            base |= dict(
                weight=w.data_ptr(),
                weight_type=CODES[dtype],
                rstd=rstd.data_ptr() if two else stats[0].data_ptr(),
                inv_n=1.0 / n,
                eps=1e-6,
                dw_partial=off(256 << 20),
                dw=dw.data_ptr(),
                dw_type=CODES[dtype],
            )
        if op.startswith("cross_entropy"):
            kind = "CrossEntropyArgs"
            stats[5].fill_(1.0)
            for i in range(0, m, 4096):
                f = a[i : i + 4096].float()
                mx = f.amax(-1)
                stats[1, i : i + len(mx)] = mx
                stats[2, i : i + len(mx)] = (f - mx[:, None]).exp_().sum(-1).log()
                del f
            base |= dict(
                target=target.data_ptr(),
                target_type=CODES["int64"],
                target_stride=1,
                ignore_index=-100,
                loss=stats[0].data_ptr(),
                loss_stride=1,
                logits=off(512 << 20),
                dloss=stats[5].data_ptr(),
                dloss_stride=1,
                max=stats[1].data_ptr(),
                max_stride=1,
                log_sum=stats[2].data_ptr(),
                log_sum_stride=1,
            )
        rows = min(m, max(1, (1 << 24) // n))
        want = self.expected(op, a[-rows:], b[-rows:], w, rstd[-rows:], target[-rows:])
        best = None
        for steps, extra in self.candidates(op, dtype, m, n):
            args = dict(base)
            fields = {f["Name"] for f in self.layouts[kind]}
            args.update({k: v for k, v in extra.items() if k in fields})
            packed = self.pack(kind, **args)
            names = "+".join(s[0]["Symbol"] for s in steps if s[0]["Op"] != "weight_gradient")
            note = f"{names} grid {steps[0][1]} c{steps[0][2]} {extra}"
            launches = [
                (
                    self.module(v["Family"]).get(v["Symbol"]),
                    config(grid, v["Threads"], c, shared, i > 0, v["Shape"] == "team"),
                )
                for i, (v, grid, c, shared) in enumerate(steps)
            ]

            def run(launches=launches, packed=packed):
                for f, c in launches:
                    launch(f, c, [packed])

            try:
                y.fill_(7.0)
                stats[0].fill_(7.0)
                run()
                torch.cuda.synchronize()
            except RuntimeError as err:
                print(f"  {note}: {err}", flush=True)
                continue
            got = (stats[0, :m][-rows:] if op == "cross_entropy_forward" else y[-rows:]).float()
            err = (got - want).norm().item() / want.norm().item()
            bad = not err < {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
            if op == "rmsnorm_backward" and m * n <= 1 << 28:
                full = (b.float() * a.float() * rstd[:, None]).sum(0)
                e2 = (dw.float() - full).norm().item() / full.norm().item()
                bad = bad or not e2 < {"float32": 1e-4, "float16": 2e-3, "bfloat16": 1e-2}[dtype]
            us = self.timer(run, repeats)
            record = {
                "op": op,
                "dtype": dtype,
                "m": m,
                "n": n,
                "us": us,
                "limit_us": limit,
                "ratio": limit / us,
                "note": note,
                "error": err,
                "bad": bad,
            }
            with self.out.open("a") as out:
                out.write(json.dumps(record) + "\n")
            if bad:
                print(f"WRONG {op} {dtype} {m}x{n} {note}: relative error {err}", flush=True)
            if best is None or us < best[0]:
                best = us, note
        if best:
            print(f"{op:26} {dtype:9} {m:6}x{n:<8} {limit / best[0]:.3f} {best[0]:8.1f}us  {best[1]}", flush=True)

    @staticmethod
    def expected(op, a, b, w, rstd, target):
        a, b, w = a.float(), b.float(), w.float()
        if op == "softmax_forward":
            return torch.softmax(a, -1)
        if op == "softmax_backward":
            return (a - (a * b).sum(-1, keepdim=True)) * b
        if op == "rmsnorm_forward":
            return a * rstd[:, None] * w
        if op == "rmsnorm_backward":
            h, g = a * rstd[:, None], b * w
            return (g - h * (g * h).mean(-1, keepdim=True)) * rstd[:, None]
        loss = torch.nn.functional.cross_entropy(a, target, reduction="none")
        if op == "cross_entropy_forward":
            return loss
        p = torch.softmax(a, -1)
        p[torch.arange(len(target)), target] -= 1
        return p


OPS = (
    "softmax_forward softmax_backward rmsnorm_forward rmsnorm_backward cross_entropy_forward cross_entropy_forward_dx "
    "cross_entropy_backward"
)
GRID = [(32768, n) for n in (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)] + [(16384, 131072), (8192, 262144)]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("table")
    p.add_argument("images")
    p.add_argument("out")
    p.add_argument("--ops", nargs="*", default=OPS.split())
    p.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    p.add_argument("--shapes", nargs="*", default=[f"{m}x{n}" for m, n in GRID])
    p.add_argument("--repeats", type=int, default=11)
    o = p.parse_args()
    tuner = Tuner(o.table, o.images, o.out)
    for s in o.shapes:
        m, n = map(int, s.split("x"))
        for d in o.dtypes:
            for op in o.ops:
                try:
                    tuner.point(op, d, m, n, o.repeats)
                except torch.OutOfMemoryError:
                    print(f"{op} {d} {s}: out of memory", flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
