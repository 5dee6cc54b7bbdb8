"""cross_entropy and linear_cross_entropy."""

import gander.jax as gj
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import close, cross_entropy, of_probabilities
from jax.random import key, normal, split, uniform

ROWS, CLASSES, WIDTH = 6, 11, 7
KEYS = split(key(0), 6)
LOGITS, WEIGHT = normal(KEYS[0], (ROWS, CLASSES)), uniform(KEYS[1], (CLASSES,))
TARGET = jnp.array([0, 10, -100, 3, 5, 5])
X, TABLE, BIAS = (
    normal(KEYS[i], shape) for i, shape in ((2, (ROWS, WIDTH)), (3, (CLASSES, WIDTH)), (4, (CLASSES,)))
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("one_pass", [True, False, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction, one_pass, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, wide = LOGITS.astype(dtype), jnp.promote_types(dtype, "float32")
        weight = WEIGHT.astype(wide)

        def both(x):
            found = [
                jax.value_and_grad(
                    lambda x, w=w, e=e: (
                        2
                        * gj.cross_entropy(
                            x, TARGET, w, reduction=reduction, label_smoothing=e, one_pass=one_pass
                        ).sum()
                    )
                )(x)
                for w, e in ((None, 0.0), (weight, 0.1))
            ]
            expected = [
                jax.value_and_grad(lambda x, w=w, e=e: 2 * cross_entropy(x, TARGET, w, reduction, e).sum())(
                    x.astype(wide)
                )
                for w, e in ((None, 0.0), (weight, 0.1))
            ]
            return found, expected

        found, expected = jax.jit(both)(x)
        for (loss, gradient), wanted in zip(found, expected, strict=True):
            assert (loss.dtype, gradient.dtype) == (wide, x.dtype)
            close((loss, gradient), wanted, "float32" if dtype == "float32" else dtype)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_the_loss(reduction, one_pass):
    more = {"z_loss": 0.1, "scale": 1.5, "softcap": 3.0, "temperature": 2.0, "label_smoothing": 0.1}

    def ours(x):
        return gj.cross_entropy(x, TARGET, reduction=reduction, one_pass=one_pass, **more).sum()

    def theirs(x):
        z = 3 * jnp.tanh(1.5 * x / 3) / 2
        counts = TARGET != -100
        squares = 0.1 * jnp.where(counts, jax.nn.logsumexp(z, -1), 0) ** 2
        loss = cross_entropy(z, TARGET, None, reduction, 0.1).sum()
        return loss + squares.sum() / (counts.sum() if reduction == "mean" else 1)

    found, expected = (jax.jit(jax.value_and_grad(f))(LOGITS) for f in (ours, theirs))
    close(found, expected, "float32")
    with pytest.raises(NotImplementedError, match=r"z_loss is 0.1 with weight and reduction 'mean'"):
        gj.cross_entropy(LOGITS, TARGET, WEIGHT, z_loss=0.1)
    with pytest.raises(Exception, match="softcap is -1"):
        gj.cross_entropy(LOGITS, TARGET, softcap=-1).block_until_ready()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_options_of_the_linear_loss(reduction, dtype):
    """Those of cross_entropy on the whole logits, from a head whose rows come in chunks."""
    more = {"z_loss": 0.1, "scale": 1.5, "softcap": 3.0, "temperature": 2.0, "label_smoothing": 0.1}

    def linear(x, table, bias):
        options = more | {"reduction": reduction, "chunk": 4}
        return gj.linear_cross_entropy(x, table, TARGET, bias, **options).sum()

    def whole(x, table, bias):
        logits = jnp.matmul(x, table.T) + bias
        return gj.cross_entropy(logits, TARGET, reduction=reduction, **more).sum()

    given = [array.astype(dtype) for array in (X, TABLE, BIAS)]
    found, expected = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(f, (0, 1, 2)))(*given)) for f in (linear, whole)
    )
    close(found, expected, dtype)
    with pytest.raises(NotImplementedError, match=r"z_loss is 0.1 with class_weight and reduction 'mean'"):
        gj.linear_cross_entropy(X, TABLE, TARGET, class_weight=WEIGHT, z_loss=0.1)
    with pytest.raises(TypeError, match="softcap is 'a'"):
        gj.linear_cross_entropy(X, TABLE, TARGET, softcap="a")


def test_single_pass():
    """The gradient that forward makes is handed on as it is, if the expected upstream gradient comes."""
    f = jax.jit(jax.value_and_grad(lambda x: 0.25 * gj.cross_entropy(x, TARGET, upstream=0.25)))
    text = f.lower(LOGITS).as_text()
    assert text.count('"gander.cross_entropy_forward.') + text.count("@gander.cross_entropy_forward.") == 1
    assert "cross_entropy_backward" not in text
    assert "gander.rescale_gradient." in text
    two = jax.grad(lambda x: 0.25 * gj.cross_entropy(x, TARGET, one_pass=False))
    close([f(LOGITS)[1]], [two(LOGITS)], "float32")
    for upstream in 0.0, jnp.float32(3), 1e30:  # changes the time, not the result
        other = jax.grad(lambda x, u=upstream: gj.cross_entropy(x, TARGET, upstream=u))(LOGITS)
        close([other], [4 * two(LOGITS)], "float32")


def test_float16_does_not_underflow():
    x = jnp.zeros((4096, 2048), jnp.float16)
    target = jnp.zeros(4096, jnp.int32)
    gradient = jax.jit(jax.grad(lambda x: 2.0**14 * gj.cross_entropy(x, target)))(x)
    np.testing.assert_allclose(gradient[:, 1:].astype(float), 4 / 2048, rtol=1e-3)


def test_divisor():
    f = jax.jit(jax.value_and_grad(lambda x, n: gj.cross_entropy(x, TARGET, reduction="sum", divisor=n)))
    loss, gradient = f(LOGITS, jnp.float32(5))
    mean, wanted = jax.value_and_grad(gj.cross_entropy)(LOGITS, TARGET)
    close([loss, gradient], [mean, wanted], "float32")
    loss, gradient = f(LOGITS, jnp.float32(0))
    assert jnp.isinf(loss)
    assert not jnp.isfinite(gradient[0]).any()
    with pytest.raises(NotImplementedError, match="a gradient of divisor is wanted"):
        jax.grad(lambda n: gj.cross_entropy(LOGITS, TARGET, reduction="sum", divisor=n))(jnp.float32(2))
    each = jax.vmap(lambda n: f(LOGITS, n)[1])(jnp.array([5.0, 10.0]))
    close(each, [wanted, wanted / 2], "float32")


def test_one_row():
    x, target = LOGITS[0], TARGET[0]
    for one_pass in True, False:
        found = jax.value_and_grad(lambda x, o=one_pass: gj.cross_entropy(x, target, one_pass=o))(x)
        close(found, jax.value_and_grad(cross_entropy)(x, target), "float32")
    each = jax.vmap(gj.cross_entropy)(LOGITS[3:], TARGET[3:])
    close([each], [cross_entropy(LOGITS[3:], TARGET[3:], reduction="none")], "float32")


@pytest.mark.parametrize("one_pass", [True, False])
def test_rows_that_do_not_count(one_pass):
    def f(x, target, **options):
        return gj.cross_entropy(x, target, one_pass=one_pass, **options)

    f_and_grad = jax.jit(jax.value_and_grad(f))
    loss, gradient = f_and_grad(LOGITS, jnp.full(ROWS, -100))
    assert jnp.isnan(loss)
    assert (gradient == 0).all()
    # Targets that are no classes are never used as an index, and ignore_index may be one of them.
    bad = TARGET.at[0].set(CLASSES).at[1].set(-1)
    each = jax.jit(lambda x, t: f(x, t, reduction="none"))(LOGITS, bad)
    np.testing.assert_array_equal(jnp.isnan(each), [True, True, False, False, False, False])
    loss, gradient = f_and_grad(LOGITS, bad)
    assert jnp.isnan(loss)
    np.testing.assert_array_equal(jnp.isnan(gradient).all(1), bad != -100)
    loss = f(LOGITS, bad, ignore_index=CLASSES, reduction="sum")
    assert jnp.isnan(loss)
    small = f(LOGITS, jnp.array([1, 2, 255, 4, 5, 6], jnp.uint8), ignore_index=255)
    assert jnp.isfinite(small)


def test_gradients_of_targets_and_weights():
    _, gradient = jax.grad(gj.cross_entropy, (0, 1), allow_int=True)(LOGITS, TARGET)
    assert gradient.dtype == jax.dtypes.float0
    for reduction in "none", "mean":
        with pytest.raises(NotImplementedError, match=r"a gradient of \w+ is wanted"):
            jax.grad(lambda w, r=reduction: gj.cross_entropy(LOGITS, TARGET, w, reduction=r).sum())(WEIGHT)
    with pytest.raises((NotImplementedError, TypeError), match=r"second derivatives|forward-mode"):
        jax.hessian(lambda x: gj.cross_entropy(x, TARGET))(LOGITS)


@pytest.mark.parametrize("soft", ["float32", "bfloat16"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_probabilities(reduction, soft):
    """With class weights and z_loss. A mean is over rows, and each row may be a sample of vmap."""
    target = uniform(KEYS[5], LOGITS.shape).astype(soft)

    def ours(x):
        return gj.cross_entropy(x, target, WEIGHT, reduction=reduction, z_loss=0.1, label_smoothing=0.1).sum()

    def theirs(x):
        each = of_probabilities(x, target, WEIGHT, 0.1) + 0.1 * jax.nn.logsumexp(x, -1) ** 2
        return each.mean() if reduction == "mean" else each.sum()

    found, expected = (jax.jit(jax.value_and_grad(f))(LOGITS) for f in (ours, theirs))
    close(found, expected, "float32")
    each = jax.vmap(lambda x, q: gj.cross_entropy(x, q, reduction=reduction))(LOGITS, target)
    close([each], [of_probabilities(LOGITS, target)], "float32")


def test_what_class_probabilities_have_not():
    target = jax.nn.softmax(LOGITS)
    half = jax.value_and_grad(lambda x, n: gj.cross_entropy(x, target, reduction="sum", divisor=n))
    close(
        half(LOGITS, 2.0),
        jax.value_and_grad(lambda x: of_probabilities(x, target).sum() / 2)(LOGITS),
        "float32",
    )
    for argument, name in (1, "target"), (2, "weight"):
        with pytest.raises(NotImplementedError, match=f"a gradient of {name} is wanted"):
            jax.grad(gj.cross_entropy, argument)(LOGITS, target, WEIGHT)
    with pytest.raises((NotImplementedError, TypeError), match=r"second derivatives|forward-mode"):
        jax.hessian(lambda x: gj.cross_entropy(x, target))(LOGITS)
    with pytest.raises(ValueError, match="ignore_index is 3 with class probabilities"):
        gj.cross_entropy(LOGITS, target, ignore_index=3)
    with pytest.raises(Exception, match=r"target has shape \(3, 11\)"):
        jax.block_until_ready(gj.cross_entropy(LOGITS, target[:3]))
    with pytest.raises(TypeError, match="target has dtype float32, expected an array of uint8"):
        gj.linear_cross_entropy(X, TABLE, target)


@pytest.mark.parametrize("chunk", [None, 1, 4, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction, chunk):
    for dtype in "float32", "float16":
        given = [array.astype(dtype) for array in (X, TABLE, BIAS)]

        def ours(x, table, bias):
            loss = gj.linear_cross_entropy(x, table, TARGET, bias, WEIGHT, reduction=reduction, chunk=chunk)
            return 2 * loss.sum()

        def formula(x, table, bias):
            return 2 * cross_entropy(x @ table.T + bias, TARGET, WEIGHT, reduction).sum()

        def both(*given):
            wide = [array.astype("float32") for array in given]
            return jax.value_and_grad(ours, (0, 1, 2))(*given), jax.value_and_grad(formula, (0, 1, 2))(*wide)

        (loss, gradients), (expected, wanted) = jax.jit(both)(*given)
        close([loss, *gradients], [expected, *wanted], dtype)
        close([ours(*given)], [expected], dtype)


def test_linear_cross_entropy_holds_a_part_of_the_logits():
    rows, classes = 512, 4096
    x, table, target = jnp.ones((rows, 8)), jnp.ones((classes, 8)), jnp.zeros(rows, jnp.int32)
    step = jax.jit(jax.value_and_grad(lambda x, w: gj.linear_cross_entropy(x, w, target, chunk=64), (0, 1)))
    memory = step.lower(x, table).compile().memory_analysis()
    assert memory.temp_size_in_bytes < rows * classes * 4 / 2


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: gj.cross_entropy(LOGITS, TARGET[:3]), ValueError, r"target has shape \(3,\)"),
        (lambda: gj.cross_entropy(LOGITS, TARGET * 1.0), TypeError, "target has dtype float32"),
        (lambda: gj.cross_entropy(LOGITS, TARGET, WEIGHT[:3]), ValueError, "weight has shape"),
        (lambda: gj.cross_entropy(LOGITS, TARGET, reduction="avg"), ValueError, "reduction is 'avg'"),
        (lambda: gj.cross_entropy(LOGITS, TARGET, divisor=2), ValueError, "expected 'sum', which it divides"),
        (
            lambda: gj.cross_entropy(LOGITS, TARGET, upstream=WEIGHT),
            ValueError,
            "expected one floating number",
        ),
        (
            lambda: gj.cross_entropy(LOGITS, TARGET, reduction="none", upstream=1.0),
            ValueError,
            "expected 'sum' or 'mean'",
        ),
        (lambda: gj.cross_entropy(LOGITS, TARGET, one_pass=1), TypeError, "one_pass is 1"),
        (lambda: gj.linear_cross_entropy(X, TABLE.T, TARGET), ValueError, "weight has shape"),
        (lambda: gj.linear_cross_entropy(X, TABLE, TARGET, BIAS[:2]), ValueError, "bias has shape"),
        (lambda: gj.linear_cross_entropy(X, TABLE.astype("float16"), TARGET), TypeError, "as x; convert"),
        (lambda: gj.linear_cross_entropy(X, TABLE, TARGET, chunk=0), ValueError, "chunk is 0"),
        (lambda: gj.linear_cross_entropy(X, TABLE, TARGET[:2]), ValueError, "target has shape"),
        (lambda: gj.linear_cross_entropy(X, TABLE, TARGET * 1.0), TypeError, "target has dtype"),
    ],
)
def test_refusals(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


def test_statistics_of_tokens():
    """All of them, and a gradient through one that has none."""
    x, index = normal(key(0), (3, 7)), jnp.array([1, -100, 4])
    outputs = ("predicted", "is_top1", "log_sum_sq_probs", "mean_logit", "log_prob")
    found = jax.jit(lambda x: gj.token_statistics(x, index, outputs=outputs))(x)
    assert found._fields == outputs and found.is_top1.dtype == bool
    largest = x.argmax(-1)
    np.testing.assert_array_equal(found.predicted, jnp.where(index < 0, -1, largest))
    np.testing.assert_array_equal(found.is_top1, (index >= 0) & (largest == index))
    p = jax.nn.softmax(x)
    squares = jnp.where(index < 0, 0, jnp.log((p * p).sum(-1)))
    np.testing.assert_allclose(found.log_sum_sq_probs, squares, rtol=1e-5)
    np.testing.assert_allclose(found.mean_logit, jnp.where(index < 0, 0, x.mean(-1)), rtol=1e-5, atol=1e-6)

    def through(x, stop=lambda v: v):
        found = gj.token_statistics(x, index, outputs=("log_prob", "mean_logit"))
        return (found.log_prob + stop(found.mean_logit)).sum()

    with pytest.raises(NotImplementedError, match=r"a gradient through mean_logit .* jax.lax.stop_gradient"):
        jax.grad(through)(x)
    stopped = jax.grad(lambda x: through(x, jax.lax.stop_gradient))(x)
    alone = jax.grad(lambda x: gj.token_statistics(x, index).log_prob.sum())(x)
    np.testing.assert_array_equal(stopped, alone)
