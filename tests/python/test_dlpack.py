"""NumPy arrays and other objects with `__dlpack__`: the C functions that own their tensors, without torch."""

import ctypes
import gc
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import gander
import numpy as np
import pytest
import torch
from gander._arrays import backend, capsules
from gander._native import library
from gander._table import OPERATORS, TORCH, arguments

F16, F32, F64 = np.float16, np.float32, np.float64


def rows(*shape, dtype=F32):
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def assert_same(array, tensor):
    assert type(array) is np.ndarray
    assert array.shape == tuple(tensor.shape)
    np.testing.assert_array_equal(array, tensor.numpy())


@pytest.mark.parametrize("shape", [(7,), (4, 7), (2, 3, 65), (0, 7)])
@pytest.mark.parametrize("dtype", [F16, F32, F64])
def test_results_are_those_of_torch_tensors(dtype, shape):
    """The bits are the same, so that the tests of accuracy for torch tensors hold for arrays too."""
    x, dy, weight = (
        rows(*shape, dtype=dtype),
        rows(*shape, dtype=dtype)[::-1].copy(),
        rows(shape[-1], dtype=dtype),
    )
    target = np.random.default_rng(1).integers(0, shape[-1], shape[:-1] or (1,)).reshape(shape[:-1])
    tx, tdy, tweight, ttarget = map(torch.from_numpy, (x, dy, weight, target))
    y, ty = gander.softmax(x), gander.softmax(tx)
    assert_same(y, ty)
    assert_same(gander.softmax_fwd(x), ty)
    assert_same(gander.softmax_bwd(dy, y), gander.softmax_bwd(tdy, ty))
    out, residual, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)
    tout, _, trstd = gander.rmsnorm_fwd(tx, tweight, store_rstd=True)
    assert residual is x
    assert_same(out, tout)
    assert_same(rstd, trstd)
    assert_same(gander.rmsnorm(x), gander.rmsnorm(tx))
    for got, expected in zip(
        gander.rmsnorm_bwd(x, weight, dy, rstd)[:2],
        gander.rmsnorm_bwd(tx, tweight, tdy, trstd)[:2],
        strict=True,
    ):
        assert_same(got, expected)
    assert gander.rmsnorm_bwd(x, None, dy, rstd)[1:] == (None, None, None)
    for reduction in ("none", "mean", "sum"):
        assert_same(
            gander.cross_entropy(x, target, reduction=reduction),
            gander.cross_entropy(tx, ttarget, reduction=reduction),
        )
    loss, lse, dx = gander.cross_entropy_fwd(x, target, return_lse=True, return_dx=True)
    for got, expected in zip(
        (loss, lse, dx), gander.cross_entropy_fwd(tx, ttarget, return_lse=True, return_dx=True), strict=True
    ):
        assert_same(got, expected)
    again = gander.cross_entropy_bwd(x, target, np.ones_like(loss), lse)
    assert_same(
        again,
        gander.cross_entropy_bwd(tx, ttarget, torch.ones_like(torch.from_numpy(loss)), torch.from_numpy(lse)),
    )


def test_out_dtype_by_any_name():
    x = rows(4, 7)
    for dtype in (F16, "float16", np.dtype(F16), torch.float16):
        assert gander.rmsnorm(x, out_dtype=dtype).dtype == F16


def test_read_only_arrays():
    x = rows(4, 7)
    expected = gander.softmax(x)
    x.flags.writeable = False
    np.testing.assert_array_equal(gander.softmax(x), expected)


BASE = rows(5, 4, 2 * 9 + 1)
LAYOUTS = {
    "offset": BASE[..., 1:10],
    "row stride": BASE[:, 1, 3:12],
    "every other column": BASE[..., ::2][..., :9],
    "transposed": rows(9, 6).T,
    "permuted": rows(4, 9, 5).transpose(2, 0, 1),
    "leading dimensions swapped": rows(4, 5, 9).transpose(1, 0, 2),
    "broadcast rows": np.broadcast_to(rows(1, 9), (6, 9)),
    "broadcast columns": np.broadcast_to(rows(6, 1), (6, 9)),
    "broadcast middle dimension": np.broadcast_to(rows(3, 1, 9), (3, 4, 9)),
    "rows backwards": rows(6, 9)[::-1],
    "columns backwards": rows(6, 9)[:, ::-1],
    "every other element": rows(18)[::2],
    "read-only": np.asarray(memoryview(rows(6, 9).tobytes())).view(F32).reshape(6, 9)[:, ::-1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_gives_the_bits_of_contiguous_rows(layout):
    x = LAYOUTS[layout]
    weight = rows(2, 9).T[:, 0]
    target = np.random.default_rng(1).integers(0, 9, (*x.shape[:-1], 2))[..., 0]

    def results(x, weight, target):
        yield gander.softmax(x)
        yield gander.softmax_bwd(x, x)
        out, _, rstd = gander.rmsnorm_fwd(x, weight, store_rstd=True)
        yield from (out, rstd)
        yield from gander.rmsnorm_bwd(x, weight, x, np.stack([rstd, rstd], -1)[..., 0])[:2]
        loss, lse, dx = gander.cross_entropy_fwd(x, target, weight=weight, return_lse=True, return_dx=True)
        yield from (loss, lse, dx)
        yield gander.cross_entropy_bwd(
            x, target, np.stack([loss, loss], -1)[..., 0], np.stack([lse, lse], -1)[..., 0]
        )

    compact = [array.copy(order="C") for array in (x, weight, target)]
    for got, expected in zip(results(x, weight, target), results(*compact), strict=True):
        assert type(got) is np.ndarray and got.flags.c_contiguous and got.flags.writeable
        np.testing.assert_array_equal(got, expected)


def test_arrays_that_numpy_cannot_export():
    record = np.zeros(4, dtype=[("a", F32), ("b", F16)])["a"]
    with pytest.raises(
        TypeError, match=r"x is a ndarray that cannot be exported through DLPack: .* multiple of itemsize"
    ):
        gander.softmax(record)


def test_masked_arrays_are_refused():
    x = np.ma.masked_array(rows(4, 6), rows(4, 6) > 1)
    for call, name in (
        (lambda: gander.softmax(x), "x"),
        (lambda: gander.rmsnorm(x.data, x[0]), "weight"),
        (lambda: gander.cross_entropy(x.data, np.ma.masked_array([0, 1, 2, 3], [0, 0, 0, 1])), "target"),
    ):
        with pytest.raises(
            TypeError, match=rf"{name} is a masked array, expected one without a mask, .*; pass {name}.filled"
        ):
            call()


def test_options_of_other_types():
    x, target = rows(4, 6), np.zeros(4, int)
    np.testing.assert_array_equal(gander.rmsnorm(x, eps=np.float32(0.5)), gander.rmsnorm(x, eps=0.5))
    np.testing.assert_array_equal(gander.softmax(x, batch_invariant=np.True_), gander.softmax(x))
    got = gander.cross_entropy(x, target, ignore_index=np.int16(0), reduction="none")
    np.testing.assert_array_equal(got, np.zeros(4))
    with pytest.raises(TypeError, match="eps is 'small', expected None or a number"):
        gander.rmsnorm(x, eps="small")
    with pytest.raises(TypeError, match=r"ignore_index is 0\.5, expected an integer"):
        gander.cross_entropy(x, target, ignore_index=0.5)
    with pytest.raises(ValueError, match="ignore_index is 18446744073709551616, expected an integer of 64"):
        gander.cross_entropy(x, target, ignore_index=2**64)


def test_the_binding_covers_the_table():
    """Every function has an option struct, and every operator a function for arrays, with its arguments."""
    for name, operator in OPERATORS.items():
        for function in (f"gander_{name}", operator.owned):
            assert library.options(function).size >= 16
    options = library.options("gander_rmsnorm", batch_invariant=1)
    assert options.size == ctypes.sizeof(options)
    assert (options.eps, options.algorithm, options.batch_invariant) == (1e-6, 0, 1)
    assert library.options("gander_cross_entropy_forward").ignore_index == -100
    assert library.options("gander_cross_entropy_forward", ignore_index=0).ignore_index == 0
    for name in TORCH:
        assert [*inspect.signature(getattr(backend, name)).parameters] == arguments(name)


def test_option_structs_are_those_of_c():
    """tests/c/layout_gen.h has the offsets that C's compilers find."""
    text = (Path(__file__).parents[1] / "c" / "layout_gen.h").read_text()
    fields = re.findall(r"F\((\w+)_options, (\w+), (\d+)\)", text)
    assert len(fields) > 200
    for function, field, offset in fields:
        assert getattr(type(library.options(function)), field).offset == int(offset)
    for function, size in re.findall(r"S\((\w+)_options, (\d+),", text):
        assert ctypes.sizeof(library.options(function)) == int(size)
    with pytest.raises(AttributeError, match="epsilon"):
        library.options("gander_rmsnorm", epsilon=1)


def test_a_library_of_another_abi_version(monkeypatch):
    monkeypatch.setattr(library, "ABI_VERSION", 99)
    monkeypatch.setitem(library.PROTOTYPES, "gander_of_version_99", (None, []))
    with pytest.raises(RuntimeError, match=r"has ABI version \d+, expected 99; reinstall gander-kernels"):
        library.load.__wrapped__()


def test_results_can_be_written_and_outlive_their_inputs():
    x = rows(4, 7)
    y = gander.softmax(x)
    copy = y.copy()
    del x
    gc.collect()
    np.testing.assert_array_equal(y, copy)
    y += 1
    np.testing.assert_array_equal(y, copy + 1)


class Legacy:
    """An array of a library from before DLPack 1.0. Its from_dlpack accepts only unversioned capsules."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __array_namespace__(self):
        return self

    @staticmethod
    def from_dlpack(result):
        class Unversioned:
            def __dlpack__(self, **options):
                return result.__dlpack__()

            def __dlpack_device__(self):
                return result.__dlpack_device__()

        return np.from_dlpack(Unversioned())


def test_unversioned_capsules():
    x, weight = rows(4, 7), rows(7)
    before = len(capsules._exported)
    y = gander.rmsnorm(Legacy(x), Legacy(weight))
    np.testing.assert_array_equal(y, gander.rmsnorm(x, weight))
    assert len(capsules._exported) == before + 1
    del y
    gc.collect()
    assert len(capsules._exported) == before


def test_a_library_without_from_dlpack_gets_the_result_itself():
    class Plain:
        def __init__(self, array):
            self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__

    x = rows(4, 7)
    result = gander.softmax(Plain(x))
    np.testing.assert_array_equal(np.from_dlpack(result), gander.softmax(x))
    with pytest.raises(BufferError, match="was already consumed through __dlpack__"):
        np.from_dlpack(result)
    gander.softmax(Plain(x)).__dlpack__(max_version=(1, 0))  # a capsule that nobody consumes


def test_deleters_run_once_on_success_and_on_refusal():
    """Memory is freed. A leak would be 64 MB in each round."""
    import resource

    x, short = rows(1024, 4096), rows(5)
    legacy = Legacy(x)

    def rounds(count):
        for _ in range(count):
            gander.softmax(x)
            gander.softmax(legacy)
            with pytest.raises(ValueError, match="weight has shape"):
                gander.rmsnorm(x, short)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(3)
    assert rounds(20) - before < 64_000


@pytest.mark.parametrize(
    ("call", "exception", "message"),
    [
        (lambda x: gander.softmax(x.astype(int)), TypeError, "x has dtype int64, expected float16"),
        (
            lambda x: gander.softmax(x.astype(">f4")),
            TypeError,
            "x is a ndarray that cannot be exported through DLPack",
        ),
        (
            lambda x: gander.rmsnorm(x, [1.0]),
            TypeError,
            r"weight is \[1.0\], expected a tensor or None",
        ),
        (
            lambda x: gander.rmsnorm(x, x[0, :3].copy()),
            ValueError,
            r"weight has shape \(3,\), expected",
        ),
        (lambda x: gander.rmsnorm(x, out_dtype="int8"), TypeError, "out_dtype is int8, expected float16"),
        (lambda x: gander.rmsnorm(x, out_dtype="quad"), TypeError, "out_dtype is quad, expected float16"),
        (lambda x: gander.cross_entropy(x, np.zeros(3, int)), ValueError, r"target has shape \(3,\)"),
        (
            lambda x: gander.cross_entropy_fwd(x, np.zeros(4, int), return_dx=True, inplace_backward=True),
            NotImplementedError,
            "inplace_backward is supported for torch tensors only",
        ),
        (
            lambda x: gander.cross_entropy_bwd(x, np.zeros(4, int), x[:, 0], x[:, 0], inplace_backward=True),
            NotImplementedError,
            "inplace_backward is supported for torch tensors only",
        ),
        (
            lambda x: gander.cross_entropy(x, np.zeros(4, int), inplace_backward=True),
            NotImplementedError,
            r"inplace_backward is supported for torch tensors only; leave it out, or pass torch\.from_dlpack",
        ),
        (
            lambda x: gander.cross_entropy(x, np.zeros(4, int), x),
            NotImplementedError,
            r"lse_partial is supported for torch tensors only; leave it out, or pass torch\.from_dlpack",
        ),
        (
            lambda x: gander.cross_entropy_fwd(x, np.zeros(4, int), x),
            NotImplementedError,
            r"target_logit is supported for torch tensors only; leave it out, or pass torch\.from_dlpack",
        ),
    ],
)
def test_refusals(call, exception, message):
    with pytest.raises(exception, match=message):
        call(rows(4, 6))


def as_bfloat16(array):
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("columns", [slice(None), slice(None, None, 2)], ids=["whole", "strided"])
def test_bfloat16_of_ml_dtypes(columns):
    """NumPy exports and imports no bfloat16: the bits travel as integers."""
    bfloat16 = pytest.importorskip("ml_dtypes", reason="NumPy has no bfloat16 of its own").bfloat16
    x = rows(4, 34).astype(bfloat16)[:, columns]
    weight, target = rows(x.shape[1], dtype=F32), np.arange(4)
    tx = as_bfloat16(np.ascontiguousarray(x))
    for got, expected in (
        (gander.softmax(x), gander.softmax(tx)),
        (gander.rmsnorm(x, weight.astype(bfloat16)), gander.rmsnorm(tx, torch.from_numpy(weight).bfloat16())),
        (
            gander.rmsnorm(x.astype(F32), weight, out_dtype="bfloat16"),
            gander.rmsnorm(tx.float(), torch.from_numpy(weight), out_dtype=torch.bfloat16),
        ),
        (
            gander.cross_entropy_fwd(x, target, return_dx=True)[1],
            gander.cross_entropy_fwd(tx, torch.from_numpy(target), return_dx=True)[1],
        ),
    ):
        assert got.dtype == bfloat16
        assert torch.equal(as_bfloat16(got), expected)
    assert gander.softmax(x, dtype="float32").dtype == F32
    residual = np.zeros_like(x := x.copy())
    gander.fused_add_rmsnorm(x, residual, None)
    assert torch.equal(as_bfloat16(residual), tx) and torch.equal(as_bfloat16(x), gander.rmsnorm(tx))


def test_a_result_that_numpy_cannot_take(monkeypatch):
    monkeypatch.delitem(sys.modules, "ml_dtypes", raising=False)
    with pytest.raises(TypeError, match=r"numpy cannot take this result .*; import ml_dtypes"):
        gander.rmsnorm(rows(4, 6), out_dtype="bfloat16")


# ---- Dimensions, by NumPy's names too ----


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("name", ["dim", "axis"])
def test_any_axis(axis, name):
    x, mask = rows(3, 4, 5), rows(4, 5) > -1
    tx, at = torch.from_numpy(x), {name: axis}
    for options, theirs in ({}, {}), ({"mask": mask, "masked": "zero"}, {"mask": torch.from_numpy(mask)}):
        for function in gander.softmax, gander.log_softmax:
            y = function(x, **at, **options)
            assert y.flags.c_contiguous
            assert_same(y, function(tx, dim=axis, **(options | theirs)))
    assert_same(gander.logsumexp(x, **at), gander.logsumexp(tx, dim=axis))
    assert_same(gander.logsumexp(x, keepdims=True, **at), gander.logsumexp(tx, dim=axis, keepdim=True))


@pytest.mark.parametrize("axis", [(0, 1), (2, 0), (0, 1, 2), (-1,)], ids=str)
def test_several_axes(axis):
    x = rows(3, 4, 5)
    tx = torch.from_numpy(x)
    assert_same(gander.logsumexp(x, axis=axis), gander.logsumexp(tx, dim=axis))
    kept = gander.logsumexp(x, axis=axis, keepdims=True)
    assert_same(kept, gander.logsumexp(tx, axis=axis, keepdims=True))
    assert kept.shape == x.sum(axis, keepdims=True).shape


@pytest.mark.parametrize("scalar", [np.array(2, F32), torch.tensor(2.0)], ids=["array", "tensor"])
def test_without_dimensions(scalar):
    for function, value in (gander.softmax, 1), (gander.log_softmax, 0), (gander.logsumexp, 2):
        for at in {}, {"axis": 0}, {"axis": -1}:
            result = function(scalar, **at)
            assert tuple(result.shape) == () and float(result) == value


@pytest.mark.parametrize(
    ("at", "exception", "message"),
    [
        ({"axis": 2}, IndexError, "axis is 2, expected -2 to 1 for x of rank 2"),
        ({"dim": 0, "axis": 1}, TypeError, "axis is 1 and dim is 0, expected one of them; leave axis out"),
        ({"axis": True}, TypeError, "axis is True, expected an int"),
        ({"axis": "rows"}, TypeError, "axis is 'rows', expected an int"),
    ],
    ids=str,
)
@pytest.mark.parametrize("function", [gander.softmax, gander.log_softmax, gander.logsumexp])
def test_axes_that_are_refused(function, at, exception, message):
    for x in rows(4, 6), torch.from_numpy(rows(4, 6)):
        with pytest.raises(exception, match=message):
            function(x, **at)


def test_debug_checks_targets():
    gander.set_debug(True)
    try:
        with pytest.raises(
            IndexError, match="target has the class 6, expected 0 to 5, or ignore_index = -100"
        ):
            gander.cross_entropy(rows(3, 6), np.array([0, 6, -100]))
    finally:
        gander.set_debug(False)


def test_explain_takes_arrays():
    assert "4 rows of 7 float32 on cpu" in gander.explain("softmax", rows(4, 7))
    assert gander.explain("rmsnorm_bwd", rows(4, 7)).startswith("rmsnorm_backward")


def test_without_torch():
    """In a process that cannot import torch."""
    script = """
        import sys
        sys.modules["torch"] = None
        import gander, numpy as np
        x = np.arange(12, dtype=np.float32).reshape(3, 4)
        y = gander.softmax(x)
        assert type(y) is np.ndarray and np.allclose(y.sum(1), 1)
        assert gander.info()["torch"] is None and gander.info()["fast_path"] is None
        gander.warmup("cpu")
        try:
            gander.nn
        except ImportError:
            print("fine")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


@pytest.mark.parametrize("returned", [7, None, "used"])
def test_what_is_no_capsule_is_named(returned):
    class Exporter:
        def __dlpack__(self, **options):
            return used if returned == "used" else returned

        def __dlpack_device__(self):
            return 1, 0

    used = np.ones((2, 3), np.float32).__dlpack__()
    torch.utils.dlpack.from_dlpack(used)
    with pytest.raises(
        TypeError, match=r"^x is an Exporter whose __dlpack__ returns .*, expected a new DLPack"
    ):
        gander.softmax(Exporter())
