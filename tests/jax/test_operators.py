"""Values and gradients beside JAX's own formulas, and the bits of gander's other functions."""

import gander
import gander.jax as gj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import CASES, arrays, close, value_and_gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype):
    case = CASES[name]
    with jax.enable_x64(dtype == "float64"):
        given = arrays(case, dtype)

        def both(*given):  # the formula's operations would round to x's dtype
            formula = [array.astype(jnp.promote_types(dtype, "float32")) for array in given]
            return value_and_gradients(case.ours, given), value_and_gradients(case.formula, formula)

        (found, gradients), (expected, wanted) = jax.jit(both)(*given)
        close(found, expected, dtype)
        close(gradients, wanted, dtype)
        assert [g.dtype for g in gradients] == [a.dtype for a in given]
        statistic = "float64" if dtype == "float64" else "float32"
        of_rows = name.startswith(("logsumexp", "token_statistics", "cross_entropy"))
        assert {str(y.dtype) for y in found} == {statistic if of_rows else dtype}


@pytest.mark.parametrize("name", ["softmax", "rmsnorm", "layernorm prenorm", "rotary", "silu_and_mul"])
def test_traces_agree(name):
    """Compiled or not, under a checkpoint, and where one argument alone is differentiated."""
    case = CASES[name]
    given = arrays(case)
    found, gradients = value_and_gradients(case.ours, given)
    again, same = jax.jit(lambda *a: value_and_gradients(jax.checkpoint(case.ours), a))(*given)
    for a, b in zip(found + gradients, again + same, strict=True):
        assert (a == b).all()
    for at in range(len(given)):
        rest = lambda one, at=at: case.ours(*given[:at], one, *given[at + 1 :])  # noqa: E731
        _, (gradient,) = value_and_gradients(rest, [given[at]])
        close([gradient], [gradients[at]], "float32")


SAME = {
    "softmax": (lambda of, x: of.softmax(x), ["x"]),
    "log_softmax": (lambda of, x: of.log_softmax(x), ["x"]),
    "logsumexp": (lambda of, x: of.logsumexp(x), ["x"]),
    "l2norm": (lambda of, x: of.l2norm(x), ["x"]),
    "rmsnorm": (lambda of, x, w: of.rmsnorm(x, w), ["x", "w"]),
    "layernorm": (lambda of, x, w: of.layernorm(x, w, w), ["x", "w"]),
    "swiglu": (lambda of, x: of.swiglu(x, x), ["x"]),
    "token_statistics": (lambda of, x, t: of.token_statistics(x, t).entropy, ["x", "t"]),
    "none": (lambda of, x, t: of.cross_entropy(x, t, reduction="none"), ["x", "t"]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SAME)
def test_bits_of_eager_calls(name, dtype):
    """gander's functions take JAX's arrays as before, and gander.jax gives the same bits."""
    function, wanted = SAME[name]
    x = jax.random.normal(jax.random.key(0), (37, 1003)).astype(dtype)
    given = {"x": x, "w": x[0], "t": jnp.arange(37, dtype=jnp.int32)}
    given = [given[key] for key in wanted]
    outside, inside = function(gander, *given), jax.jit(lambda *a: function(gj, *a))(*given)
    assert isinstance(outside, jax.Array)
    assert outside.dtype == inside.dtype
    assert (outside == inside).all()


def test_nan_and_infinity():
    x = jnp.array([[jnp.nan, 1.0], [jnp.inf, 1.0], [-jnp.inf, -jnp.inf], [-jnp.inf, 2.0]])
    found, (gradient,) = value_and_gradients(gj.softmax, [x])
    expected, (wanted,) = value_and_gradients(jax.nn.softmax, [x])
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(expected[0]))
    np.testing.assert_array_equal(np.isnan(gradient[3]), np.isnan(wanted[3]))
    np.testing.assert_array_equal(gj.logsumexp(x), jnp.array([jnp.nan, jnp.inf, -jnp.inf, 2.0]))
    # Masked elements count for nothing, whatever they are, and a row that is masked whole becomes zeros.
    where = jnp.array([[False, True], [False, True], [False, False], [True, True]])
    found, (gradient,) = value_and_gradients(lambda x: gj.softmax(x, where=where), [x])
    np.testing.assert_array_equal(found[0], [[0, 1], [0, 1], [0, 0], [0, 1]])
    assert jnp.isfinite(gradient).all()


def test_rows_of_no_elements_and_no_rows():
    assert gj.softmax(jnp.ones((0, 3))).shape == (0, 3)
    with pytest.raises(ValueError, match="expected a last dimension of 1 or more"):
        gj.softmax(jnp.ones((3, 0)))
    with pytest.raises(ValueError, match="x has rank 0"):
        gj.rmsnorm(jnp.ones(()))


def test_out_dtype():
    x = jax.random.normal(jax.random.key(0), (4, 9)).astype("bfloat16")
    y, gradient = jax.value_and_grad(lambda x: gj.rmsnorm(x, out_dtype=jnp.float32).sum())(x)
    assert (y.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    with pytest.raises(TypeError, match=r"out_dtype is 'int', expected a dtype|out_dtype has dtype int"):
        gj.rmsnorm(x, out_dtype="int32")


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda x: gj.softmax(x.astype(int)), TypeError, "x has dtype int32, expected float16, bfloat16"),
        (lambda x: gj.softmax([1.0]), TypeError, "x is a list, expected an array of JAX or NumPy"),
        (lambda x: gj.softmax(x, 2), ValueError, "axis is 2, expected -2 to 1 for x of rank 2"),
        (lambda x: gj.softmax(x, True), TypeError, "axis is True, expected an int"),
        (lambda x: gj.softmax(x, (0, 0)), ValueError, "expected one dimension or more, each once"),
        (lambda x: gj.softmax(x, where=x), TypeError, "where has dtype float32, expected bool"),
        (lambda x: gj.softmax(x, where=jnp.ones((3, 3), bool)), ValueError, "mask has shape"),
        (lambda x: gj.softmax(x, 0, causal=True), ValueError, "causal is set with axis 0"),
        (lambda x: gj.softmax(x[0], causal=True), ValueError, "expected rank 2 or more"),
        (lambda x: gj.softmax(x, algorithm="best"), ValueError, "algorithm is 'best', expected 'auto'"),
        (lambda x: gj.softmax(x, scale=2.0, algorithm="warp"), NotImplementedError, "expected 'auto'"),
        (lambda x: gj.rmsnorm(x, jnp.ones(3)), ValueError, r"weight has shape \(3,\), expected \(4,\)"),
        (lambda x: gj.rmsnorm(x, jnp.ones(4, int)), TypeError, "weight has dtype int32"),
        (lambda x: gj.rmsnorm(x, weight_offset=1.0).block_until_ready(), Exception, "weight_offset"),
        (lambda x: gj.rmsnorm(x, eps="1"), TypeError, "eps is '1', expected a number"),
        (lambda x: gj.layernorm(x, prenorm=1), TypeError, "prenorm is 1, expected True or False"),
        (lambda x: gj.layernorm(x, residual=x[0]), ValueError, "residual has shape"),
        (lambda x: gj.swiglu(x, x[:, :3]), ValueError, "up has shape"),
        (lambda x: gj.silu_and_mul(x[:, :3]).block_until_ready(), Exception, "even"),
        (lambda x: gj.rotary(x, None, x, x), ValueError, "of rank 3 or more"),
    ],
)
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call(jnp.ones((2, 4)))


def test_gradients_that_are_not_there():
    x = jnp.ones((2, 5, 4, 8))
    cos = jnp.ones((5, 4))
    with pytest.raises(NotImplementedError, match=r"a gradient of cos is wanted.*stop_gradient\(cos\)"):
        jax.grad(lambda cos: gj.rotary(x, None, cos, cos)[0].sum())(cos)
    gradient = jax.grad(lambda x: gj.rotary(x, None, *[jax.lax.stop_gradient(x[0, :, 0, :4])] * 2)[0].sum())(
        x
    )
    assert jnp.isfinite(gradient).all()
    with pytest.raises(NotImplementedError, match="second derivatives are not supported"):
        jax.grad(lambda x: jax.grad(lambda x: gj.softmax(x)[0, 0])(x).sum())(jnp.ones((2, 3)))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(gj.softmax, (jnp.ones((2, 3)),), (jnp.ones((2, 3)),))
