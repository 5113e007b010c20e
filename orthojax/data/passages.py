"""Text with repeated passages, as quotations, logs and boilerplate have them: what makes heads that copy."""

import hashlib

import numpy as np

_LENGTHS = (40, 110)  # characters of a passage, uniform
_THRICE = 0.3  # of the repeated passages


def repeat_passages(text: str, share: float, seed: int = 0) -> str:
    """The text cut into passages of 40 to 110 characters, a share of which is written twice, or, 3 in 10, three times.

    A repeated passage follows itself at once, without anything between. Where it is cut and what is repeated depends on
    the text and the seed alone, so that documents can be read in any order; with another share the cuts are the same,
    and what a smaller share repeats a larger one repeats as well.

    Args:
      text: Of one document.
      share: Of the passages, 0 to 1.
      seed: Another one repeats other passages.

    >>> text = "".join(map(chr, range(33, 133)))
    >>> len(repeat_passages(text, 1.0)) in range(200, 301), repeat_passages(text, 0.0) == text
    (True, True)
    """
    if not text:
        return text
    digest = hashlib.sha256(f"{seed} {text}".encode("utf-8", "surrogatepass")).digest()
    count = len(text) // _LENGTHS[0] + 1
    uniform = np.random.Generator(np.random.Philox(int.from_bytes(digest[:8]))).random((count, 3))
    shortest, longest = _LENGTHS
    lengths = shortest + np.floor(uniform[:, 0] * (longest - shortest + 1)).astype(int)
    times = 1 + (uniform[:, 1] < share) * (1 + (uniform[:, 2] < _THRICE))
    passages, start = [], 0
    for length, many in zip(lengths.tolist(), times.tolist(), strict=True):
        passages.append(text[start : start + length] * many)
        start += length
    return "".join(passages)
