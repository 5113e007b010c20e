"""Hadamard matrices and the cosine transform, as explicit small matrices."""

import functools
import math

import numpy as np


def _paley_core(q: int) -> np.ndarray | None:
    """[q, q] of Legendre symbols of i - j for a prime q, else None."""
    if q < 3 or any(q % d == 0 for d in range(2, math.isqrt(q) + 1)):
        return None
    symbol = np.full(q, -1, np.int8)
    symbol[[i * i % q for i in range(q)]] = 1
    symbol[0] = 0
    return symbol[(np.arange(q)[:, None] - np.arange(q)) % q]


def _paley(n: int) -> np.ndarray | None:
    """Paley's Hadamard matrix of order q + 1 (prime q = 3 mod 4) or 2 (q + 1) (prime q = 1 mod 4), if there is one."""
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
    """A Hadamard matrix: entries +1 and -1, orthogonal rows.

    Sylvester's doubling of orders 1 and of Paley's 12, 20, 28, 36, 44, ...; so every power of two, 12 * 2**k, 20 *
    2**k.

    Args:
      n: Order.

    Returns:
      int8 [n, n], or None where these constructions give none.

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
    found = _paley(n) if half is None else np.kron(np.array([[1, 1], [1, -1]]), half)
    return None if found is None else found.astype(np.int8)


@functools.lru_cache(maxsize=256)
def dct_matrix(n: int) -> np.ndarray:
    """The orthonormal cosine transform (DCT-II): C[k, i] = sqrt(2/n) cos(pi k (2i + 1) / 2n), C[0, i] = sqrt(1/n).

    Args:
      n: Size.

    Returns:
      float64 [n, n].
    """
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    # Reduced modulo 4n in integers: the cosine of a small argument is exact to the last bit.
    matrix = np.cos(np.pi / (2 * n) * (k * (2 * i + 1) % (4 * n))) * math.sqrt(2.0 / n)
    matrix[0] = math.sqrt(1.0 / n)
    return matrix
