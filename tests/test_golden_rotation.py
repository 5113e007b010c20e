"""The bases themselves, in numbers: a checkpoint holds moments in them, so they must never change."""

import os
import subprocess
import sys
import textwrap
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from orthojax.optim import RotatedAxes, Rotation, rotate

# sqrt(n) Q x, whose entries are integers: x counts 1, 2, ..., n on every row.
GOLDEN = {
    0: {
        "head/kernel": [[20, -34, 40, -4, -10, -48, 6, -6, 18, 30, 28, -12]],
        "layers/mlp/kernel": [
            [10, 2, -34, 6, 2, 2, 18, 2],
            [0, 0, -16, 0, -8, 0, 36, -4],
            [-8, -24, -12, 20, 12, 4, 12, -12],
        ],
        "layers_5/mlp/kernel": [[-18, -10, 26, -14, 10, 10, -6, 10]],
    },
    7: {
        "head/kernel": [[42, -12, -18, 22, 16, 10, -52, 4, -8, 20, 38, 10]],
        "layers/mlp/kernel": [
            [-10, -10, -10, 6, 10, 18, 14, -26],
            [0, -8, -4, 36, 0, 0, 0, -16],
            [-24, 8, 8, -8, 28, 4, 0, -8],
        ],
        "layers_5/mlp/kernel": [[14, -2, -14, -14, -18, 22, 14, 6]],
    },
}


def counting(dtype):
    stack = np.tile(np.arange(1, 9), (3, 1, 1))
    return {
        "head": {"kernel": jnp.asarray(np.arange(1, 13).reshape(1, 12), dtype)},
        "layers": {"mlp": {"kernel": jnp.asarray(stack, dtype)}},
        "layers_5": {"mlp": {"kernel": jnp.asarray(stack[0], dtype)}},
    }


def rotated(seed, wrap=lambda f: f, dtype=jnp.float32):
    transform, x = rotate(Rotation(seed=seed)), counting(dtype)
    state = transform.init(x)
    found = wrap(lambda x: transform.update(x, state)[0])(x)
    rows = {}
    for keys, y in jax.tree_util.tree_leaves_with_path(found):
        values = np.asarray(y, np.float64).reshape(-1, y.shape[-1]) * np.sqrt(y.shape[-1])
        np.testing.assert_allclose(values, values.round(), atol=1e-4)
        rows[jax.tree_util.keystr(keys, simple=True, separator="/")] = values.round().astype(int).tolist()
    return rows


@pytest.mark.parametrize("seed", GOLDEN)
def test_the_bases_are_these(seed):
    assert rotated(seed) == GOLDEN[seed]
    assert rotated(seed, jax.jit) == GOLDEN[seed]

    def second_of_two(function):
        return lambda x: jax.tree.map(lambda y: y[1], jax.vmap(function)(jax.tree.map(lambda y: jnp.stack([y] * 2), x)))

    assert rotated(seed, second_of_two) == GOLDEN[seed]
    with jax.enable_x64(True):
        assert rotated(seed, dtype=jnp.float64) == GOLDEN[seed]


def pattern(*shape):
    return jnp.asarray(np.arange(np.prod(shape)).reshape(shape) * 7919 % 13 - 6.0)


def kernel_in_basis(rotation, x):
    transform, tree = rotate(rotation), {"mlp": {"kernel": x}}
    return np.asarray(transform.update(tree, transform.init(tree))[0]["mlp"]["kernel"])


@pytest.mark.parametrize(
    ("rotation", "shape", "squared_scale", "checksum"),
    [
        (Rotation(), (2, 768), 768, 0xB0853628),
        (Rotation(), (2, 3072), 3072, 0x6D6BEFE2),
        (Rotation(axes="both"), (96, 768), 96 * 768, 0xAB1E9774),
        (Rotation(axes="both", seed=5), (3, 48, 80), 48 * 80, 0x1E41ABDF),
        (Rotation(axes=lambda path, leaf: RotatedAxes(((0, 2),))), (12, 5, 64), 768, 0xEACB868B),
        (Rotation("signed_permutation", axes="both"), (24, 131), 1, 0x2838F5E4),
    ],
)
def test_large_bases_of_signs_are_these(rotation, shape, squared_scale, checksum, x64):
    values = kernel_in_basis(rotation, pattern(*shape)) * np.sqrt(squared_scale)  # integers
    np.testing.assert_allclose(values, values.round(), atol=1e-9)
    assert zlib.crc32(values.round().astype("<i8").tobytes()) == checksum


@pytest.mark.parametrize(
    ("kind", "n", "values"),
    [
        ("hadamard", 1000, [0.5375872022286244, -2.5614449047363865, 1.931257693896781, 0.03305806080186391]),
        ("hadamard", 131, [-4.543261094637397, 8.3358812661533, -2.9387607106521965, -2.5586022926447023]),
        ("dct", 131, [-4.543261094637397, 8.3358812661533, -2.9387607106521965, -2.5586022926447023]),
        ("dct", 768, [-7.216878364870323, -4.732242371887171, -4.763139720814413, -2.337669456492124]),
    ],
)
def test_bases_with_a_cosine_are_these(kind, n, values, x64):
    row = kernel_in_basis(Rotation(kind), pattern(2, n))[1]
    np.testing.assert_allclose(row[[0, 1, n // 2, n - 1]], values, atol=1e-11)


def test_a_haar_basis_is_this(x64):
    want = [-0.46304928, 0.70829328, 0.17193932, 0.16323841, -0.47586653, 0.03531479]
    np.testing.assert_allclose(kernel_in_basis(Rotation("haar", seed=3), jnp.eye(6))[0], want, atol=1e-8)


def test_they_are_built_from_the_definition():
    """The stack is Sylvester's matrix, written out here, after signs that differ from layer to layer."""
    sylvester = np.array([[1]])
    for _ in range(3):
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    found = set()
    for rows in GOLDEN.values():
        for row in rows["layers/mlp/kernel"]:
            signs = sylvester.T @ row / 8 / np.arange(1, 9)  # H^T H = 8 I
            assert set(signs) <= {-1.0, 1.0}
            found.add(tuple(signs))
    assert len(found) == 6


def test_neither_hash_seed_nor_settings_of_the_generator_change_them():
    code = """
        import jax
        jax.config.update("jax_default_prng_impl", "rbg")
        jax.config.update("jax_threefry_partitionable", False)
        jax.config.update("jax_enable_x64", True)
        import sys
        sys.path.insert(0, sys.argv[1])
        import test_golden_rotation as golden
        assert {seed: golden.rotated(seed) for seed in golden.GOLDEN} == golden.GOLDEN
    """
    environment = {**os.environ, "PYTHONHASHSEED": "4321", "JAX_PLATFORMS": "cpu"}
    here = os.path.dirname(__file__)
    command = [sys.executable, "-c", textwrap.dedent(code), here]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
