"""Activations in another orthonormal basis. Legend: B batch, T positions, D d_model.

From Attention to Activation (arXiv 2410.17174), appendix F and Figure 6.
"""

import numpy as np
from numpy.typing import ArrayLike


def in_singular_basis(x: ArrayLike) -> np.ndarray:
    """X V for every sequence, with V [D, D] the right singular vectors of its X [T, D]; on the host.

    The paper's measure of how large an orthogonal change of basis could make the kurtosis: V gathers the energy of a
    sequence in as few channels as an orthonormal basis can. X V = U S, so the channels beyond min(T, D) are 0, whatever
    V has there; they count as channels. The signs of singular vectors are arbitrary, which moves kurtosis (whose mean
    they move) a little.

    Args:
      x: [..., T, D].

    Returns:
      [..., T, D] float64; channels in the order of their singular values, the largest first.
    """
    # NumPy's, since several batched decompositions in one program can wait for each other forever on a CPU.
    x = np.asarray(x, np.float64)
    T, D = x.shape[-2:]
    # From the eigenvectors of the smaller Gram matrix, which is several times faster than the decomposition itself.
    if T >= D:
        _, right = np.linalg.eigh(x.swapaxes(-1, -2) @ x)
        return (x @ right)[..., ::-1]
    squares, left = np.linalg.eigh(x @ x.swapaxes(-1, -2))
    turned = (left * np.sqrt(np.maximum(squares, 0.0))[..., None, :])[..., ::-1]
    return np.concatenate([turned, np.zeros((*turned.shape[:-1], D - T))], axis=-1)
