"""Parametrizations of which the fast tests run a part."""

import pytest


def quick_and_slow(cases, slow):
    """Cases for `parametrize`; `slow` are those whose parts others have, too."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case in slow)) for case in cases]
