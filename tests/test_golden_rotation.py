"""The bases themselves, in numbers: a checkpoint holds moments in them, so they must never change."""

import os
import textwrap
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import python
from test_orthogonal import reference_hash

from orthojax.optim import RotatedAxes, Rotation, rotate

# sqrt(n) Q x, whose entries are integers: x counts 1, 2, ..., n on every row.
GOLDEN = {
    0: {
        "head/kernel": [[28, 10, -28, 4, -6, 44, -18, 30, -38, 34, 16, -8]],
        "layers/mlp/kernel": [
            [2, 10, -26, -2, -6, 10, 26, -6],
            [20, -4, 4, -4, -32, 0, 12, -4],
            [6, 6, -22, -6, -2, 6, 30, -10],
        ],
        "layers_5/mlp/kernel": [[-10, -18, -14, 26, 10, 10, 10, -6]],
    },
    7: {
        "head/kernel": [[-4, 18, 8, 60, 30, -20, -42, -14, -22, -6, 0, -4]],
        "layers/mlp/kernel": [
            [-8, 8, 8, -24, -8, 0, 4, 28],
            [-4, -12, 12, -12, 24, 8, -20, 12],
            [-2, -18, -2, -2, -6, 34, -2, -10],
        ],
        "layers_5/mlp/kernel": [[14, -26, 10, 18, -10, 6, -10, -10]],
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
    transform, x = rotate(Rotation(seed=seed, axes="output")), counting(dtype)
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
        (Rotation(axes="output"), (2, 768), 768, 0x9851F5A4),
        (Rotation(axes="output"), (2, 3072), 3072, 0xA95FEF35),
        (Rotation(axes="both"), (96, 768), 96 * 768, 0xAFFA3DCF),
        (Rotation(axes="both", seed=5), (3, 48, 80), 48 * 80, 0xA8041FC7),
        (Rotation(axes=lambda path, leaf: RotatedAxes(((0, 2),))), (12, 5, 64), 768, 0x1F881AC4),
        (Rotation("signed_permutation", axes="both"), (24, 131), 1, 0x351A51E7),
    ],
)
def test_large_bases_of_signs_are_these(rotation, shape, squared_scale, checksum, x64):
    values = kernel_in_basis(rotation, pattern(*shape)) * np.sqrt(squared_scale)  # integers
    np.testing.assert_allclose(values, values.round(), atol=1e-9)
    assert zlib.crc32(values.round().astype("<i8").tobytes()) == checksum


@pytest.mark.parametrize(
    ("kind", "n", "values"),
    [
        ("hadamard", 1000, [-2.5614449047363843, -4.522057054040782, 1.8010404548061036, 2.3942754163783793]),
        ("hadamard", 131, [2.97059379264753, 0.28628708372420375, -1.784280712336006, 2.810726342399564]),
        ("dct", 131, [2.97059379264753, 0.28628708372420375, -1.784280712336006, 2.810726342399564]),
        ("dct", 768, [-1.3712068893253637, -0.2570689335885791, 0.3608439182436367, -5.347338043579437]),
    ],
)
def test_bases_with_a_cosine_are_these(kind, n, values, x64):
    row = kernel_in_basis(Rotation(kind, axes="output"), pattern(2, n))[1]
    np.testing.assert_allclose(row[[0, 1, n // 2, n - 1]], values, atol=1e-11)


def test_a_haar_basis_is_this(x64):
    want = [0.15429352, -0.54253275, 0.26911403, -0.48069978, -0.20124471, 0.58125524]
    np.testing.assert_allclose(kernel_in_basis(Rotation("haar", seed=3, axes="output"), jnp.eye(6))[0], want, atol=1e-8)


def defined_signs(name, layer, n, seed):
    """In Python integers: top bits of a hash of key and counter; the key is the CRC-32 of name, group, n and slices."""
    key = seed ^ zlib.crc32(f"{name}:0:{n}:1".encode())
    return tuple(1 - 2 * (reference_hash(key, layer * n + i) >> 31) for i in range(n))


def test_they_are_built_from_the_definition():
    """The stack is Sylvester's matrix, written out here, after signs that differ from layer to layer."""
    sylvester = np.array([[1]])
    for _ in range(3):
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    found = set()
    for seed, rows in GOLDEN.items():
        layers = [*enumerate(rows["layers/mlp/kernel"]), (5, *rows["layers_5/mlp/kernel"])]
        for layer, row in layers:
            signs = sylvester.T @ row / 8 / np.arange(1, 9)  # H^T H = 8 I
            assert tuple(signs) == defined_signs("layers/mlp/kernel/*", layer, 8, seed)
            found.add(tuple(signs))
    assert len(found) == 8


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
    done = python("-c", textwrap.dedent(code), os.path.dirname(__file__), PYTHONHASHSEED="4321")
    assert done.returncode == 0, done.stderr
