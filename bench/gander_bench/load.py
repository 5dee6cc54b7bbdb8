"""What a first call costs. The measurement runs in a process of its own, where nothing is loaded yet."""

import json
import os
import subprocess
import sys
import tempfile
import time

FUNCTIONS = ("softmax", "rmsnorm", "cross_entropy")
_ROWS = 64
_FIRST = 1024
_NEW = (1000, 4096, 257, 32768, 131072, 50257)  # other kernels, other alignments
_CHILD = """
import json, sys, time
import torch
start = time.perf_counter()
import gander
imported = (time.perf_counter() - start) * 1e3
from gander_bench.load import measure
print(json.dumps({"import": imported} | measure(sys.argv[1])))
"""


def _ms(call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(name: str) -> dict:
    """Milliseconds until results are there: for gander the `library`'s load, until it has answered a call,
    and by function the `first` call, which loads what the function needs, then the calls on each `new` shape.
    Before them the provider has used the device once, with another data type."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    settle = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.ones(1, device=device).sum()
    settle()
    figures = {}
    if name == "gander":
        import gander

        figures["library"] = _ms(lambda: gander.warmup("cpu"))

    from .cases import provider

    functions = provider(name).functions

    def first_call(function, n, dtype):
        x = torch.randn(_ROWS, n, device=device, dtype=dtype)
        more = {
            "softmax": (),
            "rmsnorm": (torch.ones(n, device=device, dtype=dtype),),
            "cross_entropy": (torch.randint(n, (_ROWS,), device=device),),
        }[function]
        settle()

        def call():
            functions[function](x, *more)
            settle()

        return _ms(call)

    first_call("softmax", _FIRST, torch.float32)
    for function in FUNCTIONS:
        figures[function] = {
            "first": first_call(function, _FIRST, torch.bfloat16),
            "new": [first_call(function, n, torch.bfloat16) for n in _NEW],
        }
    return figures


def in_a_fresh_process(name: str) -> dict:
    """measure(name), with the time that `import gander` takes after torch. Compiled code that is cached on
    disk would hide what the first user of a shape waits for, so the caches are empty ones."""
    with tempfile.TemporaryDirectory() as empty:
        caches = {"TRITON_CACHE_DIR": f"{empty}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor"}
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, name], env=os.environ | caches, capture_output=True, text=True
        )
    if child.returncode:
        raise RuntimeError((child.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(child.stdout.splitlines()[-1])
