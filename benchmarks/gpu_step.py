"""Times variants of a training step on a GPU in one command: python benchmarks/gpu_step.py --seconds=570 > rows.jsonl.

Every variant is timed in turn with the default, whose own row is the control, and printed as a line of JSON as soon as
it is known, those that tell most first; what --seconds leaves no time for is left out. Models are those of
configs/paper, with GPT-2's vocabulary. XLA's flags are options of one compilation, so one process measures all.

--lower needs no GPU: it lowers every variant for CUDA. Where JAX's CUDA plugin is installed it also compiles it for an
H100 and prints what benchmarks/roofline.py estimates.
"""

import contextlib
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import attention
import jax
import jax.numpy as jnp
import numpy as np
import roofline
from comparing import compare, parser
from training import TINY, VOCAB_SIZE

from orthojax.config import Config, DataConfig, OptimConfig, TrainConfig
from orthojax.machine import environment
from orthojax.model import flops_per_token, gpt2
from orthojax.ops import cross_entropy
from orthojax.train import model_flops_per_token, model_flops_utilization, step


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to compute the step of softmax-1 with OrthoAdam, or with `cured=False` of softmax with AdamW."""

    name: str
    cured: bool = True
    model: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes of `ModelConfig`
    train: dict[str, Any] = dataclasses.field(default_factory=dict)  # changes of `TrainConfig`
    patches: dict[str, Any] = dataclasses.field(default_factory=dict)  # attributes of modules, by dotted path
    flags: dict[str, Any] = dataclasses.field(default_factory=dict)  # of XLA


THREE_PASSES = {"orthojax.ops.cross_entropy._statistics": cross_entropy._in_three_passes}
KEPT = {"orthojax.model.layers._recomputed": lambda activation: activation}
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
LOOP, FLOAT32_LOGITS = {"unroll_layers": False}, {"logits_dtype": "float32"}
DEFAULT = Variant("default")
BEFORE = Variant("none of the changes", model=LOOP, train=FLOAT32_LOGITS, patches=THREE_PASSES | KEPT)
VANILLA = Variant("vanilla", cured=False)
BFLOAT16 = Variant("residual stream in bfloat16", model={"residual_dtype": "bfloat16"})
PRODUCTS = Variant("products by cuBLAS", flags=CUBLAS)
BOTH = Variant("bfloat16 stream, cuBLAS", model=BFLOAT16.model, flags=CUBLAS)
SINGLE = (  # one change each, against the default
    Variant("loop over layers", model=LOOP),
    Variant("logits in float32", train=FLOAT32_LOGITS),
    Variant("loss in three passes", patches=THREE_PASSES),
    Variant("activations kept", patches=KEPT),
    Variant("query, key, value in one product", flags=CUBLAS | {"xla_gpu_dot_merger_threshold_mb": 4096}),
    Variant("no command buffers", flags={"xla_gpu_enable_command_buffer": ""}),
    Variant("logits of 2 GB at a time", patches={"orthojax.ops.cross_entropy._LOGITS_BYTES_ELSEWHERE": 2**31}),
    Variant("recompute all but products", model={"remat": "dots"}),
    Variant("loop, recompute all but products", model=LOOP | {"remat": "dots"}),
    Variant("latency hiding", flags={"xla_gpu_enable_latency_hiding_scheduler": True}),
    Variant("two microbatches", train={"accumulation_steps": 2}),
    Variant("without autotuning", flags={"xla_gpu_autotune_level": 0}),
    Variant("layers without a scan", model={"scan_layers": False}),
    Variant("LayerNorm, biases", model={"norm": "layernorm", "use_bias": True}),
)
SIZES = {  # model, sequences, length
    "60m": ("60m", 128, 256),
    "130m": ("130m", 32, 1024),
    "60m of 131,072 tokens": ("60m", 512, 256),
    "130m of 65,536 tokens": ("130m", 64, 1024),
}
STEPS = 5  # of a timed call
_STATES: dict[str, Any] = {}
DECISIVE = (  # what the roofline of the compiled program says is best, at the sizes at which it is best
    ("130m of 65,536 tokens", (BOTH, VANILLA)),
    ("60m of 131,072 tokens", (BOTH, VANILLA)),
)
PLAN = (
    ("60m", (BEFORE, VANILLA, BOTH)),
    ("130m", (VANILLA, BOTH, BEFORE)),
    ("60m", (BFLOAT16, PRODUCTS, *SINGLE)),
    ("130m", (BFLOAT16, PRODUCTS, *SINGLE)),
)


def config_of(variant: Variant, size: str, tiny: bool, on_gpu: bool) -> Config:
    """Returns the config of a run; on a GPU with its attention, which then never falls back."""
    of, rows, length = SIZES[size]
    rows, length = (4, 16) if tiny else (rows, length)
    model: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "norm": "rmsnorm_single", "use_bias": False}
    model |= TINY | {"num_layers": 2} if tiny else {}
    if on_gpu:
        model |= {"dtype": "bfloat16", "attention_implementation": "cudnn"}
    normalizer, optimizer = ("softmax1", "orthoadam") if variant.cured else ("softmax", "adam")
    return Config(
        model=gpt2(of, **model | {"normalizer": normalizer} | variant.model),
        optim=OptimConfig(optimizer=optimizer, weight_decay=0.1),
        data=DataConfig(sequence_length=length),
        train=TrainConfig(steps=10_000, batch_size=rows, **variant.train),
    )


@contextlib.contextmanager
def built(config: Config, variant: Variant) -> Iterator[step.Program]:
    """Builds a variant; what is patched is so while its step is traced."""
    with contextlib.ExitStack() as patched:
        for name, value in variant.patches.items():
            patched.enter_context(mock.patch(name, value))
        step._build.cache_clear()  # runs that share a config would share what was traced with other patches
        yield step.build(config)


def compiled_step(config: Config, variant: Variant, on_gpu: bool) -> tuple[Callable[[], Any], dict[str, Any]]:
    """Returns a function that runs `STEPS` training steps per call, with the time and memory of its compilation."""
    shape, started = (config.train.batch_size, config.data.sequence_length + 1), time.perf_counter()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, config.model.vocab_size, shape), jnp.int32)
    with built(config, variant) as program:
        shapes = jax.eval_shape(program.init, jax.random.key(0))
        if str(shapes) not in _STATES:  # of the last size only; compiling `init` takes as long as the step
            _STATES.clear()
            _STATES[str(shapes)] = program.init(jax.random.key(0))
        state = jax.tree.map(jnp.copy, _STATES[str(shapes)])
        lowered = program.step.lower(state, tokens)  # pyright: ignore[reportFunctionMemberAccess]
    compiled = lowered.compile(compiler_options=variant.flags if on_gpu else {})
    about = {"compile_s": time.perf_counter() - started}
    about["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes

    def call() -> Any:
        nonlocal state
        metrics = None
        for _ in range(STEPS):
            state, metrics = compiled(state, tokens)
        return metrics

    return call, about


def in_turn(plan: Sequence[tuple[str, Sequence[Variant]]]) -> Iterator[tuple[str, Variant]]:
    """Yields sizes and variants in the order of a plan; the default is the first of its size."""
    seen = set()
    for size, variants in plan:
        for variant in variants if size in seen else (DEFAULT, *variants):
            yield size, variant
        seen.add(size)


def failure(error: Exception) -> dict[str, str]:
    """Returns what a row says of a variant that failed: the others are still worth their time."""
    return {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}


def measured(plan: Any, tiny: bool, seconds: float, repeats: int, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each variant of a plan until the next may take too long.

    MFU counts attention as what a causal mask leaves; `mfu_full` all T x T of it, as nanoGPT does.
    """
    started, longest, defaults = time.perf_counter(), 0.0, {}
    for size, variant in in_turn(plan):
        begun = time.perf_counter()
        if begun - started + longest > seconds:
            continue
        config = config_of(variant, size, tiny, on_gpu)
        length = config.data.sequence_length
        row: dict[str, Any] = {"model": f"gpt2 {size}", "variant": variant.name}
        row["batch"] = f"{config.train.batch_size} x {length}"
        try:
            call, about = compiled_step(config, variant, on_gpu)
            functions = {"default": defaults.setdefault(size, call)} | {variant.name: call}
            times = compare(functions, repeats)[variant.name]
        except Exception as error:  # out of memory, or a flag that this XLA lacks
            yield row | failure(error)
            continue
        times["seconds"] /= STEPS
        speed = config.train.batch_size * length / times["seconds"]
        flops = (model_flops_per_token(config.model, length), flops_per_token(config.model, length))
        found = (model_flops_utilization(speed, of, device_count=1) for of in flops)
        yield row | times | {"tokens_per_second": speed} | dict(zip(("mfu", "mfu_full"), found, strict=True)) | about
        longest = max(longest, time.perf_counter() - begun)


def attention_ratios(tiny: bool, repeats: int, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yields forward and backward passes of softmax-1 and softmax at several lengths."""
    implementation, dtype, calls = ("cudnn", jnp.bfloat16, 10) if on_gpu else ("xla", jnp.float32, 1)
    for shape in attention.SHAPES["tiny" if tiny else "accelerator"]:
        operands = [jax.random.normal(jax.random.key(i), shape, dtype) for i in range(4)]
        functions = attention.attentions(implementation, shape[2])
        functions = {name: attention.repeated(functions[name], True, calls) for name in ("softmax", "softmax1")}
        calls_of = {name: functools.partial(function, *operands) for name, function in functions.items()}
        for name, times in compare(calls_of, repeats).items():
            yield {"attention": name, "shape": list(shape)} | times | {"seconds": times["seconds"] / calls}


def lowered(tiny: bool) -> Iterator[dict[str, Any]]:
    """Yields what lowering for CUDA shows of every variant, and what compiling for an H100 does if that is possible."""
    try:
        place: Any = roofline.h100()
    except Exception as error:  # whatever a missing plugin raises
        print(f"not compiled, only lowered: {str(error).splitlines()[0]}", file=sys.stderr)
        place = None
    for size, variant in in_turn(PLAN[::2] if tiny else PLAN):
        config = config_of(variant, size, tiny, True)
        # Choices by platform are those of a GPU; the attention kernel is not asked if it runs here.
        cpu, as_gpu = jax.default_device(jax.devices("cpu")[0]), mock.patch("jax.default_backend", return_value="gpu")
        with cpu, as_gpu, built(config, variant) as program:
            tokens = jax.ShapeDtypeStruct((config.train.batch_size, config.data.sequence_length + 1), jnp.int32)
            arguments = jax.eval_shape(program.init, jax.random.key(0)), tokens
            if place is not None:
                arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments)
            traced = program.step.trace(*arguments)  # pyright: ignore[reportFunctionMemberAccess]
            lowered = traced.lower(lowering_platforms=("cuda",)) if place is None else traced.lower()
        row: dict[str, Any] = {"model": f"gpt2 {size}", "variant": variant.name}
        row["attention_kernels"] = lowered.as_text().count("@__cudnn$fmha")
        yield row | (_compiled_for_h100(lowered, variant) if place is not None else {})


def _compiled_for_h100(lowered: Any, variant: Variant) -> dict[str, Any]:
    try:
        compiled = lowered.compile(compiler_options=variant.flags | {"xla_gpu_autotune_level": 0})
    except Exception as error:  # a flag that this XLA lacks
        return failure(error)
    return {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes} | roofline.estimate(compiled.as_text())


def rows_of(arguments: Any, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yields the rows of one call."""
    if arguments.lower:
        yield from lowered(arguments.tiny)
        return
    yield {"environment": environment()}
    plan = DECISIVE if arguments.decisive else PLAN[:1] if arguments.tiny else PLAN
    for k, row in enumerate(measured(plan, arguments.tiny, arguments.seconds, arguments.repeats, on_gpu)):
        yield row
        if k == 1 and not arguments.decisive:
            yield from attention_ratios(arguments.tiny, arguments.repeats, on_gpu)


def main() -> None:
    options, on_gpu = parser(__doc__ or ""), jax.default_backend() == "gpu"
    options.add_argument("--seconds", type=float, default=570.0, help="no variant begins that may end after this")
    options.add_argument("--decisive", action="store_true", help="only the rows that tell most")
    options.add_argument("--lower", action="store_true", help="lower for CUDA, without a GPU")
    arguments = options.parse_args()
    if not (on_gpu or arguments.lower or arguments.tiny):
        print("variants of the step are timed on a GPU only; without one: --lower, --tiny", file=sys.stderr)
        return
    for row in rows_of(arguments, on_gpu):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
