"""Rows that are sharded over two devices are computed where they are. Nothing is gathered."""

import re
import subprocess
import sys

import gander.jax as gj
import jax
import jax.numpy as jnp
import pytest
from formulas import CASES, arrays, close, cross_entropy, value_and_gradients
from jax.random import key, normal, randint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

AUTO = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
EXPLICIT = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))


def placed(mesh, array, *spec):
    return jax.device_put(array, NamedSharding(mesh, P(*spec)))


def collectives(function, *given):
    text = jax.jit(function).lower(*given).compile().as_text()
    return re.findall(r" (all-\w+(?:-\w+)*|reduce-scatter|collective-\w+)\(", text)


# How arguments are sharded, and how many sums over devices the gradients need.
SHARDED = {
    "softmax": ([("d",)], 0),
    "softmax where": ([("d",)], 0),
    "logsumexp where": ([("d",)], 0),
    "token_statistics": ([("d",)], 0),
    "cross_entropy of probabilities": ([("d",)], 0),
    "rmsnorm": ([("d",), ()], 1),
    "rmsnorm heads": ([("d",), (), ()], 1),
    "rmsnorm prenorm": ([("d",), (), ("d",)], 1),
    "layernorm": ([("d",), (), ()], 1),
    "l2norm": ([("d",)], 0),
    "swiglu": ([("d",), ("d",)], 0),
    "silu_and_mul": ([("d",)], 0),
    "rotary": ([("d",), ("d",)], 0),
    "qk_norm_rotary": ([(None, None, "d"), (None, None, "d"), (), ()], 1),
}


@pytest.mark.parametrize("name", SHARDED)
def test_rows_stay_where_they_are(name):
    case, (specs, sums) = CASES[name], SHARDED[name]
    given = arrays(case)
    expected = value_and_gradients(case.formula, given)
    sharded = [placed(AUTO, array, *spec) for array, spec in zip(given, specs, strict=True)]

    def step(*given):
        upstream = jax.tree.map(jnp.ones_like, jax.eval_shape(case.ours, *given))
        results, pull = jax.vjp(case.ours, *given)
        return jax.tree.leaves(results), pull(jax.tree.map(jnp.multiply, upstream, results))

    found = collectives(step, *sharded)
    assert set(found) <= {"all-reduce"}
    assert (len(found) > 0) == (sums > 0)
    results, gradients = jax.jit(step)(*sharded)
    close(results, expected[0], "float32")
    wanted = jax.vjp(case.formula, *given)[1](case.formula(*given))
    close(gradients, wanted, "float32")
    assert all(r.sharding.spec[: len(specs[0])] == specs[0] for r in results)
    eager = jax.tree.leaves(case.ours(*sharded))
    assert all(r.sharding.spec[: len(specs[0])] == specs[0] for r in eager)


@pytest.mark.parametrize("one_pass", [True, False])
def test_the_mean_of_sharded_rows(one_pass):
    x, target = normal(key(0), (6, 11)), jnp.array([0, -100, -100, 3, 5, 5])
    f = jax.value_and_grad(lambda x, t: gj.cross_entropy(x, t, one_pass=one_pass))
    given = placed(AUTO, x, "d"), placed(AUTO, target, "d")
    assert set(collectives(f, *given)) == {"all-reduce"}
    expected = jax.value_and_grad(lambda x: cross_entropy(x, target))(x)
    close(jax.jit(f)(*given), expected, "float32")


def test_linear_cross_entropy_of_sharded_rows():
    x, table, target = normal(key(0), (16, 7)), normal(key(1), (11, 7)), randint(key(2), (16,), 0, 11)
    f = jax.value_and_grad(lambda x, w, t: gj.linear_cross_entropy(x, w, t), (0, 1))
    given = placed(AUTO, x, "d"), placed(AUTO, table), placed(AUTO, target, "d")
    assert set(collectives(f, *given)) == {"all-reduce"}
    loss, gradients = jax.jit(f)(*given)
    formula = jax.value_and_grad(lambda x, w: cross_entropy(x @ w.T, target), (0, 1))(x, table)
    close([loss, *gradients], jax.tree.leaves(formula), "float32")


@pytest.mark.parametrize(
    ("call", "specs", "words"),
    [
        (gj.softmax, [(None, "d")], "dimension 1 of x is sharded over 'd', expected it whole"),
        (gj.rmsnorm, [("d",), ("d",)], "dimension 0 of weight is sharded over 'd'"),
        (lambda x: gj.softmax(x, causal=True), [("d",)], "dimension 0 of x is sharded"),
        (lambda x, w: gj.rmsnorm(x[None], w[None, :] * jnp.ones((4, 1))), [("d",), ()], "dimension 1 of x"),
    ],
)
def test_sharded_columns_are_refused(call, specs, words):
    for mesh in AUTO, EXPLICIT:
        shapes = [(4, 8), (8,)][: len(specs)]
        given = [placed(mesh, jnp.ones(shape), *spec) for shape, spec in zip(shapes, specs, strict=True)]
        with jax.set_mesh(mesh), pytest.raises(Exception, match=re.escape(words)) as refused:
            jax.block_until_ready(jax.jit(call)(*given))
        how = "jax.reshard(" if mesh is EXPLICIT else "jax.lax.with_sharding_constraint("
        assert how in str(refused.value)


def test_what_the_refusal_advises():
    x = placed(AUTO, normal(key(0), (4, 8)), None, "d")
    whole = NamedSharding(AUTO, P(None, None))
    y = jax.jit(lambda x: gj.softmax(jax.lax.with_sharding_constraint(x, whole)))(x)
    close([y], [jax.nn.softmax(x)], "float32")


def test_results_that_are_wanted_in_columns():
    """The consumer's sharding does not divide the rows of the call."""
    x, table = normal(key(0), (4, 8)), placed(AUTO, normal(key(1), (8, 6)), "d")
    f = jax.jit(lambda x, w: gj.softmax(x) @ w)
    close([f(placed(AUTO, x), table)], [jax.nn.softmax(x) @ table], "float32")


@pytest.mark.parametrize("name", ["softmax", "rmsnorm", "rotary"])
def test_explicit_axes(name):
    case, (specs, _) = CASES[name], SHARDED[name]
    given = arrays(case)
    with jax.set_mesh(EXPLICIT):
        sharded = [placed(EXPLICIT, array, *spec) for array, spec in zip(given, specs, strict=True)]
        results, pull = jax.vjp(jax.jit(case.ours), *sharded)
        gradients = pull(results)
        assert jax.typeof(jax.tree.leaves(results)[0]).sharding.spec[0] == "d"
    close(jax.tree.leaves(results), jax.tree.leaves(case.formula(*given)), "float32")
    close(gradients, jax.vjp(case.formula, *given)[1](case.formula(*given)), "float32")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    x, weight, target = normal(key(0), (4, 11)), normal(key(1), (11,)), randint(key(2), (4,), 0, 11)

    def local(x, weight, target):
        losses = gj.cross_entropy(gj.rmsnorm(x, weight), target, reduction="sum")
        return jax.lax.psum(losses, "d")

    def loss(x, weight):
        specs = P("d"), P(), P("d")
        return jax.shard_map(local, mesh=AUTO, in_specs=specs, out_specs=P(), check_vma=check_vma)(
            x, weight, target
        )

    def formula(x, weight):
        return cross_entropy(CASES["rmsnorm"].formula(x, weight), target, reduction="sum")

    found = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, weight)
    expected = jax.value_and_grad(formula, (0, 1))(x, weight)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


WITHOUT_SHARDY = """
import re
import subprocess
import sys
import gander.jax, jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

jax.config.update("jax_use_shardy_partitioner", False)
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, P("d")))
step = jax.jit(jax.grad(lambda x, w: (gander.jax.rmsnorm(x, w) ** 2).sum(), (0, 1)))
text = step.lower(x, jnp.ones(8)).compile().as_text()
assert set(re.findall(r" (all-[a-z-]+|collective[a-z-]+)[(]", text)) == {"all-reduce"}
try:
    jax.jit(gander.jax.softmax)(jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P(None, "d"))))
except Exception as error:
    assert "dimension 1 of x is sharded over 'd'" in str(error), error
else:
    raise AssertionError("columns were gathered")
"""


def test_without_shardy():
    """XLA's older partitioner, which asks how results are sharded. An error there would abort the process."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_SHARDY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
