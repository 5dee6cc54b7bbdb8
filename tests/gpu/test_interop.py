"""CuPy and JAX arrays on the device, through __dlpack__: types of results, and the order on streams."""

import gc

import gander
import numpy as np
import pytest
import torch
from grid import Inputs, same_bits

SHAPES = ((40, 64), (40, 1001), (300, 8192), (3, 300001))


@pytest.fixture(scope="module")
def cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    try:
        cupy.zeros(1)
    except Exception as error:
        pytest.skip(f"CuPy cannot use this device: {error}")
    return cupy


@pytest.fixture(scope="module")
def jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        pytest.skip(f"JAX has no CUDA device: {error}")
    torch.cuda.set_device(0)  # JAX sets up all devices and leaves the last one current
    return jax


def results(a):
    """The results of every function on arrays of any library."""
    y = gander.softmax_fwd(a.x)
    out, _, rstd = gander.rmsnorm_fwd(a.x, a.weight, store_rstd=True)
    loss, lse, dx = gander.cross_entropy_fwd(a.x, a.target, return_lse=True, return_dx=True)
    return {
        "y": y,
        "dy": gander.softmax_bwd(a.dy, y),
        "out": out,
        "rstd": rstd,
        **dict(zip(("dx", "dw"), gander.rmsnorm_bwd(a.x, a.weight, a.dy, rstd)[:2], strict=True)),
        "loss": loss,
        "lse": lse,
        "gradient": dx,
        "mean": gander.cross_entropy(a.x, a.target),
        "backward": gander.cross_entropy_bwd(a.x, a.target, loss, lse),
    }


class Arrays:
    def __init__(self, a, convert):
        self.x, self.dy, self.weight, self.target = map(convert, (a.x, a.dy, a.weight, a.target))


@pytest.mark.parametrize("m, n", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_cupy(cupy, dtype, m, n):
    a = Inputs(m, n, dtype)
    want = results(a)
    torch.cuda.synchronize()
    arrays = Arrays(a, lambda t: cupy.asarray(t.contiguous()))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        got = results(arrays)
    stream.synchronize()
    for what, value in got.items():
        assert isinstance(value, cupy.ndarray), what
        assert same_bits(torch.from_dlpack(value).view(want[what].shape), want[what]), what


def test_cupy_strides(cupy):
    x = cupy.random.standard_normal((64, 300), dtype=cupy.float32)
    for view in (x[:, 3:200], x[::2], x[5:, :128], x.T, x[:, ::3]):
        got = torch.from_dlpack(gander.softmax(view))
        assert same_bits(got, gander.softmax(torch.from_dlpack(view)))


def test_cupy_memory_comes_back(cupy):
    runtime = cupy.cuda.runtime
    pool = runtime.deviceGetDefaultMemPool(0)
    # Rows this long take two passes, whose scratch memory comes from the driver's pool.
    x = cupy.random.standard_normal((3, 300001), dtype=cupy.float32)
    target = cupy.zeros(3, dtype=cupy.int64)

    def used():
        gc.collect()
        cupy.cuda.Device().synchronize()
        return runtime.memPoolGetAttribute(pool, runtime.cudaMemPoolAttrUsedMemCurrent)

    def step():
        gander.softmax(x)
        gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)

    for _ in range(3):
        step()
    before = used()
    for _ in range(1000):
        step()
    assert used() == before


@pytest.mark.parametrize("m, n", SHAPES)
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["float16", "bfloat16", "float32"]
)
def test_jax(jax, dtype, m, n):
    a = Inputs(m, n, dtype)
    a.target = a.target.int()  # by default JAX has no 64-bit integers
    want = results(a)
    torch.cuda.synchronize()
    got = results(Arrays(a, lambda t: jax.dlpack.from_dlpack(t.contiguous())))
    for what, value in got.items():
        assert isinstance(value, jax.Array), what
        value = torch.from_dlpack(value.block_until_ready())
        assert same_bits(value.view(want[what].shape), want[what]), what


def test_jax_computes_on_results(jax):
    x = jax.numpy.ones((8, 1001)) * 2
    y = gander.softmax(x) * 1001
    np.testing.assert_allclose(np.asarray(y), np.ones((8, 1001)), rtol=1e-6)


def test_libraries_do_not_mix(cupy):
    x = cupy.ones((4, 10), dtype=cupy.float32)
    with pytest.raises((RuntimeError, TypeError), match="target"):
        gander.cross_entropy(x, np.zeros(4, np.int64))
