"""A clear refusal where a vendor's kernel is compiled for another platform than its own.

A named implementation traces anywhere, so that it can be lowered for an accelerator on a machine without one. Left to
itself, JAX would say of a program that is then compiled for the machine at hand that a translation rule is missing.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

_HARDWARE = {"cuda": "an NVIDIA GPU", "tpu": "a TPU"}

_compiled_for_p = Primitive("orthojax_compiled_for")
_compiled_for_p.def_abstract_eval(lambda x, **_: x)
_compiled_for_p.def_impl(lambda x, **parameters: jax.jit(lambda x: _compiled_for_p.bind(x, **parameters))(x))
batching.defvectorized(_compiled_for_p)


def compiled_for(array: jax.Array, implementation: str, platform: str) -> jax.Array:
    """The array itself, in programs that are compiled for one platform.

    Args:
      array: Any; not to be differentiated through, so inside of a derivative rule.
      implementation: For the message.
      platform: "cuda" or "tpu".

    Raises:
      NotImplementedError: When the program is lowered for another platform.
    """
    return _compiled_for_p.bind(array, implementation=implementation, platform=platform)


def _lower(ctx: mlir.LoweringRuleContext, x: Any, *, implementation: str, platform: str) -> list[Any]:
    platforms = ctx.module_context.platforms
    if set(platforms) != {platform}:
        raise NotImplementedError(
            f"attention with implementation={implementation!r} needs {_HARDWARE[platform]}, and this program is "
            f"compiled for {' and '.join(map(repr, platforms))}; 'xla' runs everywhere, None picks by the device"
        )
    return [x]


def _no_second_derivative(primals: Any, tangents: Any, *, implementation: str, platform: str) -> Any:
    del primals, tangents, platform
    raise NotImplementedError(
        f"attention by {implementation!r} has no second derivative and no forward-mode one; implementation='xla' has"
    )


ad.primitive_jvps[_compiled_for_p] = _no_second_derivative
mlir.register_lowering(_compiled_for_p, _lower)
