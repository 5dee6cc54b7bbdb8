"""vmap, scan, export and donated buffers."""

import subprocess
import sys

import gander.jax as gj
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from formulas import CASES, ROWS, Case, arrays, close, cross_entropy, value_and_gradients
from jax.random import key, normal, randint

# Arguments that are batched, and for how many calls of the operator the program is then.
BATCHED = {
    "softmax": [(0,)],
    "softmax where": [(1,)],
    "logsumexp": [(0,)],
    "token_statistics": [(0,), (1,)],
    "cross_entropy of probabilities": [(0,)],
    "rmsnorm": [(0, None), (0, 0), (None, 0), (2, 1)],
    "rmsnorm prenorm": [(0, None, 0), (0, None, None)],
    "layernorm": [(0, None, 0), (0, None, None)],
    "swiglu": [(0, None), (1, 0)],
    "silu_and_mul": [(0,)],
    "rotary": [(0, 0), (0, None)],
    "qk_norm_rotary": [(0, 0, None, 0)],
}


@pytest.mark.parametrize(("name", "axes"), [(name, axes) for name in BATCHED for axes in BATCHED[name]])
def test_vmap(name, axes):
    """Values and gradients of each sample, and the gradient of the whole batch."""
    case, size = CASES[name], 3
    shapes = [
        shape if at is None else (*shape[:at], size, *shape[at:])
        for shape, at in zip(case.shapes, axes, strict=True)
    ]
    given = arrays(Case(case.ours, case.formula, shapes))

    def both(*given):
        return [
            (
                jax.vmap(lambda *a, f=function: value_and_gradients(f, a), axes)(*given),
                value_and_gradients(jax.vmap(function, axes), given),
            )
            for function in (case.ours, case.formula)
        ]

    found, expected = jax.jit(both)(*given)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


@pytest.mark.parametrize("name", ["rmsnorm", "layernorm"])
def test_batched_weights_are_not_those_of_heads(name):
    """A batch of B weights (B, N) beside rows (B, H, N) with B = H."""
    x, weight = normal(key(0), (3, 3, 11)), normal(key(1), (3, 11))
    function, formula = (lambda x, w, f=f: f(x, w) for f in (getattr(gj, name), CASES[name].formula))

    def both(x, w):
        return [
            (jax.vmap(f)(x, w), jax.vmap(lambda x, w, f=f: value_and_gradients(f, [x, w]))(x, w))
            for f in (function, formula)
        ]

    found, expected = jax.jit(both)(x, weight)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


def calls(function, *given):
    """The custom calls of gander in a program, and its loops."""
    text = jax.jit(function).lower(*given).as_text()
    return text.count("custom_call @gander."), text.count("stablehlo.while")


def test_a_batch_is_one_call_or_a_loop():
    x, weight, weights = normal(key(0), (3, 4, 11)), normal(key(1), (11,)), normal(key(1), (3, 11))
    assert calls(jax.vmap(gj.rmsnorm, (0, None)), x, weight) == (1, 0)
    assert calls(jax.vmap(gj.rmsnorm), x, weights) == (1, 1)
    target = randint(key(2), (3, 4), 0, 11)
    assert calls(jax.vmap(gj.cross_entropy), x, target) == (1, 0)
    assert calls(jax.vmap(jax.grad(gj.cross_entropy)), x, target) == (1, 0)
    assert calls(jax.vmap(jax.vmap(gj.softmax)), x) == (1, 0)


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_of_losses(reduction, one_pass):
    x, target = normal(key(0), (3, 4, 11)), randint(key(1), (3, 4), 0, 11).at[0, 0].set(-100)
    weights = jax.random.uniform(key(2), (3, 11))

    def ours(x, t, w=None):
        return gj.cross_entropy(x, t, w, reduction=reduction, one_pass=one_pass).sum()

    def formula(x, t, w=None):
        return cross_entropy(x, t, w, reduction).sum()

    def both(x):
        return [
            (
                jax.vmap(jax.value_and_grad(f))(x, target),
                jax.vmap(jax.grad(f))(x, target, weights),
                jax.vmap(jax.grad(f), (None, 0))(x[0], target),
                jax.grad(lambda x, f=f: (jax.vmap(f)(x, target) * jnp.arange(3.0)).sum())(x),
            )
            for f in (ours, formula)
        ]

    found, expected = jax.jit(both)(x)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


def test_scan_with_gradient():
    weights, x = normal(key(0), (4, 11)), normal(key(1), (5, 11))

    def through(norm):
        def layer(x, w):
            return x + norm(x, w), None

        return lambda x, ws: (jax.lax.scan(jax.checkpoint(layer), x, ws)[0] ** 2).sum()

    def both(x, ws):
        return [jax.value_and_grad(through(f), (0, 1))(x, ws) for f in (gj.rmsnorm, CASES["rmsnorm"].formula)]

    found, expected = jax.jit(both)(x, weights)
    close(jax.tree.leaves(found), jax.tree.leaves(expected), "float32")


def test_export():
    """A program keeps its calls, also with numbers of rows that are open, and for CUDA without a device."""
    rows = jax.export.symbolic_shape("rows, 11")

    def step(x, weight, target):
        return jax.value_and_grad(lambda x: gj.cross_entropy(gj.rmsnorm(x, weight), target))(x)

    shapes = [
        jax.ShapeDtypeStruct(s, d) for s, d in ((rows, "float32"), ((11,), "float32"), (rows[:1], "int32"))
    ]
    with pytest.raises(ValueError, match=r"gander\.rmsnorm_forward"):
        jax.export.export(jax.jit(step))(*shapes)
    exported = jax.export.export(
        jax.jit(step), platforms=("cpu", "cuda"), disabled_checks=gj.disabled_checks
    )(*shapes)
    loaded = jax.export.deserialize(exported.serialize())
    for count in 3, 8:
        given = normal(key(0), (count, 11)), normal(key(1), (11,)), randint(key(2), (count,), 0, 11)
        close(jax.tree.leaves(loaded.call(*given)), jax.tree.leaves(step(*given)), "float32")
    linear = jax.jit(lambda x, target: gj.linear_cross_entropy(x, jnp.ones((5, 11)), target))
    with pytest.raises(NotImplementedError, match="expected sizes that are known"):
        jax.export.export(linear, disabled_checks=gj.disabled_checks)(shapes[0], shapes[2])


def test_donated_buffers():
    x = normal(key(0), (64, 128))
    expected = gj.softmax(gj.rmsnorm(x))
    found = jax.jit(lambda x: gj.softmax(gj.rmsnorm(x)), donate_argnums=0)(x + 0)
    assert (found == expected).all()
    step = jax.jit(jax.grad(lambda x: gj.cross_entropy(x, jnp.zeros(64, int))), donate_argnums=0)
    close([step(x + 0)], [jax.grad(lambda x: cross_entropy(x, jnp.zeros(64, int)))(x)], "float32")


def test_arguments_stay_as_they_are():
    """What backward writes over is a copy, if somebody still has it."""
    x, target = normal(key(0), ROWS), randint(key(1), ROWS[:-1], 0, ROWS[-1])
    _, pull = jax.vjp(lambda x: gj.cross_entropy(x, target), x)
    (first,), (second,) = pull(jnp.float32(3)), pull(jnp.float32(1))
    close([first], [3 * second], "float32")
    (again,) = pull(jnp.float32(1))
    assert (again == second).all()


def test_fork():
    """A child of a process in which the library runs is refused in words, and does not hang."""
    program = """
import os, sys
import gander.jax, jax.numpy as jnp
x = jnp.ones((2, 3))
if len(sys.argv) > 1:
    gander.jax.softmax(x).block_until_ready()
    from gander._native import library
    if os.fork() == 0:
        try:
            library.check(library.load().gander_warmup(library.Device(1, 0)))
        except RuntimeError as error:
            os._exit(7 if "fork" in str(error) else 1)
        os._exit(2)
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
assert "libgander.so" not in open("/proc/self/maps").read()
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", program, "fork"]).returncode == 7


def test_a_program_that_runs_again():
    """Buffers move between runs, and what a graph of XLA's has kept of a call would be written to then."""

    def step_with(norm):
        return jax.jit(jax.value_and_grad(lambda x, w: norm(jnp.tanh(x + 1) * 2, w).mean()))

    step, formula = step_with(gj.rmsnorm), step_with(CASES["rmsnorm"].formula)
    held = []
    for run in range(12):
        x, weight = normal(key(run), (40 + 8 * (run % 2), 33)), normal(key(-run), (33,))
        held.append(jnp.ones((run + 1, 4096)))  # other buffers, some of which go back
        value, gradient = step(x, weight)
        held = held[-3:]
        expected, wanted = formula(x, weight)
        close([value, gradient], [expected, wanted], "float32")
        assert all((other == 1).all() for other in held)


def test_two_devices_at_once():
    devices = jax.devices()[:2]
    if len(devices) < 2 and jax.default_backend() != "cpu":
        pytest.skip("needs two GPUs")
    assert len(devices) == 2
    x = normal(key(0), (33, 1001))
    results = [jax.jit(gj.softmax)(jax.device_put(x, device)) for device in devices * 4]
    np.testing.assert_array_equal(*(np.asarray(result) for result in results[:2]))
    assert {next(iter(result.devices())) for result in results} == set(devices)
