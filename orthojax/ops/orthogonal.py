"""Orthogonal maps along one axis of an array: fast fixed transforms, hashed signs, Haar matrices.

The fixed transforms store no matrix: an orthonormal Hadamard (or cosine) transform is applied as two small factors, and
made unique by random signs that are a hash of a key, hence part of the program rather than state.
"""

import functools
import math
import operator
import string
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import jax.scipy.fft
import numpy as np

FixedKind = Literal["hadamard", "dct"]

# A factor of 128 x 128 float32 is 64 kB: compilers fold it, tensor cores like it. Two of them reach 16,384.
_MAX_FACTOR = 128
# On accelerators; see `fixed_transform`.
_MAX_DENSE = 1024
# On a CPU: rows of a matrix that is applied as a sum of slices, and of one applied as a single product of rows.
_MAX_SUMMED = 16
_MAX_PRODUCT = 96


def _mix(x: Any) -> Any:
    """Applies a bijection of uint32 in which every input bit flips every output bit with probability close to 1/2."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


def hashed(key: Any, counter: Any) -> Any:
    """Returns pseudo-random bits, uint32 like `counter`: a hash of it and of a key; of NumPy or traced arrays."""
    outer = _mix(key)
    # Two rounds with two keys: after one, the streams of two keys would be reorderings of each other.
    return _mix(_mix(counter ^ outer) + _mix(outer ^ np.uint32(0x9E3779B9)))


def position_bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Computes `hashed` of the positions in an array, row by row (modulo 2**32): the same however it is sharded."""
    position = jnp.zeros(shape, jnp.uint32)
    for axis, length in enumerate(shape):
        position = position * jnp.uint32(length % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return hashed(key, position)


def hash_bits(key: int, layers: Sequence[int], n: int) -> np.ndarray:
    """Returns pseudo-random bits that are the same on every machine and with every version of NumPy and JAX.

    uint32 [len(layers), n]; entry (l, i) is a hash of `key`, 0 to 2**32 - 1, and `layers[l] * n + i` (modulo 2**32).
    """
    counter = (np.asarray(layers, np.uint64)[:, None] * np.uint64(n) + np.arange(n, dtype=np.uint64)).astype(np.uint32)
    return hashed(np.asarray([key], np.uint32), counter)


def hash_signs(key: int, layers: Sequence[int], n: int) -> np.ndarray:
    """Returns random signs, int8 [len(layers), n]: +1 if the top bit of `hash_bits` (same arguments) is 0, else -1.

    >>> hash_signs(0, [0, 1], 8)
    array([[ 1, -1,  1, -1,  1, -1,  1,  1],
           [ 1,  1,  1,  1, -1,  1,  1, -1]], dtype=int8)
    """
    return (1 - 2 * (hash_bits(key, layers, n) >> np.uint32(31)).astype(np.int8)).astype(np.int8)


def traced_signs(key: int, layers: Sequence[int], n: int) -> jax.Array:
    """Computes `hash_signs` of consecutive layers in the program, which then holds no constant for them."""
    counter = jax.lax.iota(np.uint32, len(layers) * n) + np.uint32(layers[0] * n % 2**32)
    bits = hashed(np.asarray([key], np.uint32), counter)
    signs = (1 - 2 * (bits >> np.uint32(31)).astype(np.int8)).astype(np.int8)
    return jax.lax.optimization_barrier(signs).reshape(len(layers), n)  # or each row of a kernel would hash them again


def hash_permutations(key: int, layers: Sequence[int], n: int) -> np.ndarray:
    """Returns random permutations, int32 [len(layers), n]: the stable order of `hash_bits` (same arguments)."""
    return np.argsort(hash_bits(key, layers, n), axis=-1, kind="stable").astype(np.int32)


def haar(seed: Sequence[int], n: int) -> np.ndarray:
    """Draws a matrix from the Haar (uniform) distribution on the orthogonal group, on the host.

    Takes the QR decomposition of a Gaussian matrix, with signs such that R has a positive diagonal: otherwise the
    result is orthogonal but not uniform (Mezzadri, How to generate random matrices from the classical compact groups,
    2007). Equal seeds (integers >= 0) give equal matrices: float64 [n, n], with max |Q^T Q - I| below 1e-12.
    """
    q, r = np.linalg.qr(np.random.default_rng(list(seed)).standard_normal((n, n)))
    return q * np.where(np.diagonal(r) < 0, -1.0, 1.0)


@functools.lru_cache(maxsize=1024)
def factor_sizes(n: int, kind: FixedKind = "hadamard") -> tuple[int, ...]:
    """Returns the factors into which the transform of size n is split.

    They are (n,) up to 128, else two factors of at most 128: the pair with the largest Hadamard part; among those, one
    whose first factor is a power of two of at least 16, then the most equal pair, then the one with the larger second
    factor. If there is no pair (a prime factor over 128, or n over 16,384) or the kind is `dct`, they are () and a
    cosine transform is used.

    >>> factor_sizes(64), factor_sizes(768), factor_sizes(1000), factor_sizes(4099)
    ((64,), (32, 24), (25, 40), ())
    """
    if kind not in get_args(FixedKind):
        raise ValueError(f"unknown kind {kind!r}; allowed: {', '.join(map(repr, get_args(FixedKind)))}")
    if n <= _MAX_FACTOR:
        return (n,)
    pairs = [(a, n // a) for a in range(2, _MAX_FACTOR + 1) if n % a == 0 and 2 <= n // a <= _MAX_FACTOR]
    if kind == "dct" or not pairs:
        return ()

    def preference(pair: tuple[int, int]) -> tuple[int, bool, int, int]:
        first, second = pair
        hadamard_part = math.prod(size for size in pair if hadamard_matrix(size) is not None)
        # Such a first factor is all butterflies on a CPU. Any other is copied for each row of a last axis.
        return hadamard_part, first >= 16 and first.bit_count() == 1, min(pair), second

    return max(pairs, key=preference)


def apply_matrix(
    x: jax.Array, matrix: jax.Array, axis: int, *, batch_axes: Sequence[int] = (), transpose: bool = False
) -> jax.Array:
    """Multiplies one axis by a matrix in place: y[..., i, ...] = sum_j matrix[i, j] x[..., j, ...].

    `matrix` is [*batch, n, n], cast to the dtype of x. `batch_axes` are the axes of x along which every slice has its
    own matrix, in the order of `matrix`; all axes are >= 0.
    """
    letters = string.ascii_lowercase[: x.ndim]
    old, new = letters[axis], "Z"
    batch = "".join(letters[a] for a in batch_axes)
    pair = old + new if transpose else new + old
    spec = f"{letters},{batch}{pair}->{letters.replace(old, new)}"
    return jnp.einsum(spec, x, jnp.asarray(matrix, x.dtype))


def _kronecker_factors(n: int, kind: FixedKind) -> tuple[list[np.ndarray], float]:
    """Returns the one or two matrices of `factor_sizes`, and the scale that makes their product orthonormal."""
    factors, scale = [], 1.0
    for size in factor_sizes(n, kind):
        hadamard = hadamard_matrix(size) if kind == "hadamard" else None
        factors.append(dct_matrix(size) if hadamard is None else hadamard)
        # Entries of +-1 are exact in the reduced precision that accelerators multiply with, 1/sqrt(n) is not.
        scale *= 1.0 if hadamard is None else 1 / math.sqrt(size)
    return factors, scale


def _constant(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """Returns a matrix in the dtype of x; the program holds one byte for each sign."""
    return jnp.asarray(matrix if matrix.dtype == np.int8 else matrix.astype(x.dtype)).astype(x.dtype)


def _split(x: jax.Array, factors: Sequence[np.ndarray], axis: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], *map(len, factors), *x.shape[axis + 1 :])


def _apply_kronecker(x: jax.Array, factors: Sequence[np.ndarray], axis: int) -> jax.Array:
    """Multiplies one axis by the Kronecker product of `factors`, one after the other, and moves no axis."""
    y = _split(x, factors, axis)
    for i, factor in enumerate(factors):
        y = _apply_factor(y, _constant(factor, x), axis + i)
    return y.reshape(x.shape)


def _apply_factor(y: jax.Array, matrix: jax.Array, axis: int) -> jax.Array:
    """Multiplies one axis by a matrix [n, n], or by one for each leading index, [*leading, n, n]."""
    if axis == y.ndim - 1:
        return y @ matrix.T
    # With one copy of the matrix for each leading index the product comes out in place: otherwise XLA appends the new
    # axis and transposes, which costs the CPU more than the product.
    matrices = jnp.broadcast_to(matrix, (*y.shape[:axis], *matrix.shape[-2:]))
    leading = tuple(range(axis))
    return jax.lax.dot_general(matrices, y, (((axis + 1,), (axis,)), (leading, leading)))


def _on_accelerator(
    x: jax.Array, signs: jax.Array | None, factors: Sequence[np.ndarray], axis: int, transpose: bool
) -> jax.Array:
    y = x if signs is None or transpose else x * signs.astype(x.dtype)
    if x.shape[axis] > _MAX_DENSE:
        y = _apply_kronecker(y, [factor.T if transpose else factor for factor in factors], axis)
    else:
        # Built by the program from its factors, which are small constants.
        matrix = functools.reduce(jnp.kron, [_constant(factor, x) for factor in factors])
        y = apply_matrix(y, matrix, axis, transpose=transpose)
    return y if signs is None or not transpose else y * signs.astype(x.dtype)


# On a CPU, passes over the array dominate. A factor of few rows is a sum that XLA fuses with the signs, a larger one is
# a product. Neither moves an axis.


def _on_cpu(
    x: jax.Array, signs: jax.Array | None, factors: Sequence[np.ndarray], axis: int, transpose: bool
) -> jax.Array:
    is_last = axis == x.ndim - 1
    parts = _parts_of_rows(factors) if is_last else _two_parts(factors)
    parts = [part.T if transpose else part for part in parts]
    y = _split(x, parts, axis)
    if signs is not None:
        # A quotient is computed once: XLA recomputes what it takes for cheap, such as a hash, for each element.
        signs = 1 / _split(signs, parts, axis).astype(x.dtype)
    return (_rotate_rows if is_last else _rotate_inner)(y, signs, parts, axis, transpose).reshape(x.shape)


def _rotate_rows(
    y: jax.Array, signs: jax.Array | None, parts: Sequence[np.ndarray], axis: int, transpose: bool
) -> jax.Array:
    """Transforms contiguous rows, split into the axes from `axis` on, as sums of slices and one final product."""
    before, after = (None, signs) if transpose else (signs, None)
    for i, part in enumerate(parts[:-1]):
        if len(part) <= _MAX_SUMMED:
            y, before = _sum_of_slices(y, before, part, axis + i), None
        else:
            y, before = _apply_factor(y if before is None else y * before, _constant(part, y), axis + i), None
    y = _apply_factor(y if before is None else y * before, _constant(parts[-1], y), y.ndim - 1)
    return y if after is None else y * after


def _sum_of_slices(y: jax.Array, signs: jax.Array | None, matrix: np.ndarray, axis: int) -> jax.Array:
    """Multiplies an axis other than the last by the signs, then by a small matrix."""
    columns = matrix.T.reshape(len(matrix), *[1] * axis, len(matrix), *[1] * (y.ndim - axis - 1))
    terms = []
    for k, column in enumerate(columns):
        of_y, *of_signs = (jax.lax.slice_in_dim(a, k, k + 1, axis=axis) for a in (y, signs) if a is not None)
        terms.append(math.prod(of_signs, start=of_y) * _constant(column, y))
    return functools.reduce(operator.add, terms)


def _rotate_inner(
    y: jax.Array, signs: jax.Array | None, parts: Sequence[np.ndarray], axis: int, transpose: bool
) -> jax.Array:
    """Transforms the axes `axis` and `axis + 1`, which are not the last, by two products."""
    outer, inner = (_constant(part, y) for part in parts)
    before, after = (None, signs) if transpose else (signs, None)
    if signs is not None and math.prod(signs.shape[axis + 2 :]) == 1:  # they scale columns or rows of the matrices
        before, after = None, None
        rows_and_columns = (len(inner), 1) if transpose else (1, len(inner))
        signs = signs.reshape(*signs.shape[: axis + 1], *rows_and_columns)
        inner = jnp.expand_dims(inner, range(axis + 1)) * signs
    steps = ((inner, axis + 1), (outer, axis))
    y = y if before is None else y * before
    for matrix, at in steps[::-1] if transpose else steps:
        y = y if matrix.size == 1 else _apply_factor(y, matrix, at)
    return y if after is None else y * after


def _two_parts(factors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns two factors for two products, the first of which may have one row."""
    if len(factors) == 2:
        return [*factors]
    (whole,) = factors
    rest = _divided(whole, 8) if len(whole) >= 64 else None
    return [np.ones((1, 1), np.int8), whole] if rest is None else [_hadamard(8), rest]


def _parts_of_rows(factors: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns factors for sums of few rows, and a last one for a product, of 24 to 96 rows if possible."""
    rest, inner = factors if len(factors) == 2 else (*factors, np.ones((1, 1), np.int8))
    parts = []
    while (n := len(rest) * len(inner)) > _MAX_PRODUCT:
        radix = next((r for r in (8, 4, 2) if n // r >= 24 and _divided(rest, r) is not None), None)
        if radix is None:
            return [part for part in (*parts, rest, inner) if len(part) > 1]
        parts.append(_hadamard(radix))
        rest = _hadamard(len(rest) // radix)
    return [*parts, np.kron(rest, inner)]


def _divided(matrix: np.ndarray, radix: int) -> np.ndarray | None:
    """Returns the matrix whose Kronecker product after the Hadamard matrix of `radix` rows is `matrix`, or None."""
    n, remainder = divmod(len(matrix), radix)
    return None if remainder or matrix.dtype != np.int8 else hadamard_matrix(n)


def _hadamard(n: int) -> np.ndarray:
    matrix = hadamard_matrix(n)
    assert matrix is not None
    return matrix


# A jitted function inside the program: leaves of equal shape are traced and lowered once.
@functools.partial(jax.jit, static_argnames=("axis", "kind", "transpose"))
def fixed_transform(
    x: jax.Array,
    axis: int,
    *,
    kind: FixedKind = "hadamard",
    transpose: bool = False,
    signs: jax.Array | np.ndarray | None = None,
) -> jax.Array:
    """Applies a fixed orthonormal transform F, or its transpose (which is its inverse), along one axis.

    `hadamard`: every entry of F is +1/sqrt(n) or -1/sqrt(n) if Hadamard factors exist (up to 16,384: each power of two,
    12 * 2**k, 20 * 2**k and many more); other sizes are a Hadamard times a cosine transform, or a cosine transform. F
    is the Kronecker product of the matrices of `factor_sizes`, on every platform; how it is computed is decided when
    the program is lowered. On a CPU, where passes over the array cost more than arithmetic, factors of up to 16 rows of
    the last axis are sums of slices, which XLA fuses with the signs, before one product of up to 96 rows; other axes
    take two products, which the signs are part of. Other platforms use one dense matrix up to n = 1,024, because 2 n
    FLOP per element take no longer than reading it, and the two factors above.

    `dct` is the orthonormal DCT-II for every n. x is a float array [..., n, ...], `axis` >= 0; `signs`, +1 and -1, are
    broadcast against x: the result is F (signs * x), or with `transpose` signs * (F^T x). Raises ValueError for another
    kind, an axis that x does not have, or x of another dtype.

    >>> x = jnp.array([1.0, 0.0, 0.0, 0.0])
    >>> print(fixed_transform(x, 0))
    [0.5 0.5 0.5 0.5]
    """
    if not 0 <= axis < x.ndim or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"axis={axis} of {x.dtype} {x.shape}; allowed: 0 to {x.ndim - 1} of floats")
    factors, scale = _kronecker_factors(x.shape[axis], kind)
    signs = None if signs is None else jnp.asarray(signs)
    if factors:
        how = {"factors": factors, "axis": axis, "transpose": transpose}
        cpu, other = functools.partial(_on_cpu, **how), functools.partial(_on_accelerator, **how)
        return jax.lax.platform_dependent(x, signs, cpu=cpu, default=other) * scale
    before, after = (1 if signs is None else signs.astype(x.dtype), 1)[:: -1 if transpose else 1]
    transform = jax.scipy.fft.idct if transpose else jax.scipy.fft.dct
    return transform(x * before, axis=axis, norm="ortho").astype(x.dtype) * after


# Explicit small matrices.


def _paley_core(q: int) -> np.ndarray | None:
    """Returns [q, q] of Legendre symbols of i - j for a prime q, else None."""
    if q < 3 or any(q % d == 0 for d in range(2, math.isqrt(q) + 1)):
        return None
    symbol = np.full(q, -1, np.int8)
    symbol[[i * i % q for i in range(q)]] = 1
    symbol[0] = 0
    return symbol[(np.arange(q)[:, None] - np.arange(q)) % q]


def _paley(n: int) -> np.ndarray | None:
    """Makes Paley's Hadamard matrix of order q + 1 (prime q = 3 mod 4) or 2 (q + 1) (prime q = 1 mod 4), if any."""
    for q, residue in ((n - 1, 3), (n // 2 - 1, 1)):
        core = _paley_core(q)
        if q % 4 != residue or core is None:
            continue
        conference = np.pad(core, ((1, 0), (1, 0)), constant_values=1)
        conference[0, 0] = 0
        if residue == 1:
            identity = np.eye(q + 1, dtype=np.int8)
            return np.kron(conference, [[1, 1], [1, -1]]) + np.kron(identity, [[1, -1], [-1, -1]])
        conference[1:, 0] = -1
        return conference + np.eye(q + 1, dtype=np.int8)
    return None


@functools.lru_cache(maxsize=256)
def hadamard_matrix(n: int) -> np.ndarray | None:
    """Returns a Hadamard matrix of order n, int8 [n, n] with entries +1 and -1 and orthogonal rows, or None.

    Uses Sylvester's doubling of order 1 and of Paley's 12, 20, 28, 36, 44, ...: every power of two, 12 * 2**k,
    20 * 2**k. None if these constructions give no matrix.

    >>> hadamard_matrix(4)
    array([[ 1,  1,  1,  1],
           [ 1, -1,  1, -1],
           [ 1,  1, -1, -1],
           [ 1, -1, -1,  1]], dtype=int8)
    >>> hadamard_matrix(6) is None
    True
    """
    if n == 1:
        return np.ones((1, 1), np.int8)
    if n < 1 or (n != 2 and n % 4):
        return None
    half = hadamard_matrix(n // 2)
    matrix = _paley(n) if half is None else np.kron(np.array([[1, 1], [1, -1]]), half)
    return None if matrix is None else matrix.astype(np.int8)


@functools.lru_cache(maxsize=256)
def dct_matrix(n: int) -> np.ndarray:
    """Makes the orthonormal DCT-II, float64: C[k, i] = sqrt(2/n) cos(pi k (2i + 1) / 2n), C[0, i] = sqrt(1/n)."""
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    # Reduced modulo 4n in integers: the cosine of a small argument is exact to the last bit.
    matrix = np.cos(np.pi / (2 * n) * (k * (2 * i + 1) % (4 * n))) * math.sqrt(2.0 / n)
    matrix[0] = math.sqrt(1.0 / n)
    return matrix
