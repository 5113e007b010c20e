"""Counts what a training step communicates, from the compiled program; needs none of the devices that it asks about.

    python benchmarks/collectives.py --model=1.4b --mesh=1x8x1,2x2x2 --optimizers=adam,orthoadam,muon

Meshes are data x fsdp x tensor. Bytes are those that a device sends over a ring in one step: of an array of S bytes
over g devices S (g - 1) / g for an all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce.
Products are FLOPs of a device. --platform=cuda compiles for H100s, with JAX's CUDA plugin; cpu, the default, has other
fusions and reduces bfloat16 in float32.
"""

import argparse
import collections
import contextlib
import functools
import math
import os
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import roofline
from comparing import show
from jax.experimental import topologies

from orthojax.config import Config, DataConfig, MeshConfig, OptimConfig, RotationConfig, TrainConfig
from orthojax.model import gpt2, llama2
from orthojax.train import step

OPTIMIZERS = {
    "adam": OptimConfig(optimizer="adam"),
    "orthoadam": OptimConfig(optimizer="orthoadam"),
    "haar": OptimConfig(optimizer="orthoadam", rotation=RotationConfig(kind="haar")),
    "output": OptimConfig(optimizer="orthoadam", rotation=RotationConfig(axes="output")),
    "muon": OptimConfig(optimizer="muon", muon_embeddings="orthoadam"),
}
LLAMA_7B = {"num_layers": 32, "d_model": 4096, "num_heads": 32, "d_mlp": 11_008, "vocab_size": 32_000}
TINY = {"num_layers": 8, "d_model": 64, "num_heads": 2, "d_mlp": 128, "vocab_size": 512, "max_length": 32}
# The bytes that a device sends, over the bytes of the array that is whole afterwards, or before, for g devices.
_SENT = {"all-gather": 1, "reduce-scatter": 1, "all-to-all": 1, "ragged-all-to-all": 1, "all-reduce": 2}


def config_of(arguments: argparse.Namespace, optimizer: str, sizes: tuple[int, ...]) -> Config:
    """Returns a run of GPT-2, or with `7b` of Llama 2, with 8 rows of 2,048 tokens a device."""
    data, fsdp, tensor = sizes
    options: Any = {"vocab_size": 50_304, "max_length": 2048, "norm": "rmsnorm_single", "normalizer": "softmax1"}
    options |= {"dtype": "bfloat16", "use_bias": False} | (TINY if arguments.tiny else {})
    if arguments.platform == "cuda":
        options["attention_implementation"] = "cudnn"
    make = functools.partial(llama2, "130m", **options | LLAMA_7B)
    parts = arguments.accumulation
    return Config(
        model=make() if arguments.model == "7b" else gpt2(arguments.model, **options),
        optim=OPTIMIZERS[optimizer],
        data=DataConfig(sequence_length=options["max_length"]),
        train=TrainConfig(steps=10_000, batch_size=8 * math.prod(sizes), accumulation_steps=parts),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor, gather_table=arguments.gather_table),
    )


def compiled_step(config: Config) -> Any:
    """Compiles the step of a run for the devices of its mesh, from shapes alone."""
    program = step.build(config)
    assert program.mesh is not None
    state, place = step.shapes_of(program), jax.sharding.NamedSharding(program.mesh, step.ROWS)
    shape = (config.train.batch_size, config.data.sequence_length + 1)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place)
    return program.step.lower(state, tokens).compile()  # pyright: ignore[reportFunctionMemberAccess]


def count(program: str) -> dict[str, float]:
    """Counts a step's bytes on the wire, all together and by kind, and FLOPs of products, from the program's text."""
    computations = roofline.computations(program)
    found: dict[str, float] = collections.defaultdict(float)
    for kind, value in _counted(computations, "ENTRY"):
        found[kind] += value
    return {"bytes": sum(value for kind, value in found.items() if kind != "flops"), **found}


def _counted(computations: dict[str, list[roofline.Operation]], name: str) -> Iterator[tuple[str, float]]:
    """Yields bytes of every collective, and FLOPs of every product, as often as its loop runs."""
    types = {operation.name: operation.type for operation in computations[name]}
    for operation in computations[name]:
        kind = operation.kind.removesuffix("-start")
        times = 1
        if kind == "while":
            trips = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.attributes)
            times = int(trips[1]) if trips else 1
        if kind in _SENT:
            yield kind, _SENT[kind] * _wire_bytes(operation, types)
        elif kind == "collective-permute":
            yield kind, float(roofline.bytes_of(types[operation.operands[0]]))
        else:
            yield "flops", roofline.product_flops(operation, types)
        for key in ("body", "calls", "to_apply"):
            called = re.search(rf"\b{key}=%?([\w.\-]+)", operation.attributes)
            if called and kind not in _SENT:
                yield from ((what, times * value) for what, value in _counted(computations, called[1]))


def _wire_bytes(operation: roofline.Operation, types: dict[str, str]) -> float:
    """Returns S (g - 1) / g of a collective, for the larger of what goes in and what comes out."""
    into = sum(roofline.bytes_of(types[name]) for name in operation.operands)
    out = roofline.bytes_of(operation.type)
    out -= into if operation.kind.endswith("-start") and operation.type.startswith("((") else 0
    size = _group_size(operation.attributes)
    return max(into, out) * (size - 1) / size


def _group_size(attributes: str) -> int:
    """Returns between how many devices a collective is, in whichever of XLA's three ways its groups are written."""
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[\d+,(\d+)\]", attributes):
        return int(tiled[1])
    by_name = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\S*\))? \{([^}]*)\}", attributes)
    if by_name is None:
        raise ValueError(f"no groups of devices in {attributes[:200]}")
    sizes = dict(re.findall(r"('\w+')=(\d+)", by_name[1]))
    parts = re.findall(r"('\w+')(?::\(\d+\)(\d+))?", by_name[2])  # 'axis', or a part of it as 'axis':(before)size
    return math.prod(int(part or sizes[name]) for name, part in parts)


@contextlib.contextmanager
def on_devices(platform: str, number: int) -> Iterator[None]:
    """Shows `number` devices of a platform that need not be there; those of a CPU are asked for before JAX starts."""
    if platform == "cpu":
        yield
        return
    jax.config.update("jax_platforms", "cpu")  # else the plugin asks for a driver
    jax.devices()  # registers the plugin
    described = topologies.get_topology_desc(platform="cuda", target_config=roofline.H100, topology=f"1x1x{number}")
    shown = {"devices": lambda *_: described.devices, "device_count": lambda *_: number}
    with contextlib.ExitStack() as patched:
        for name, value in shown.items():
            patched.enter_context(mock.patch(f"jax.{name}", value))
        patched.enter_context(mock.patch("jax.default_backend", return_value="gpu"))
        patched.enter_context(mock.patch("orthojax.ops.attention.cudnn.unavailable", return_value=""))
        patched.enter_context(mock.patch("orthojax.ops.attention.cudnn.compute_capability", return_value=(9, 0)))
        yield


def row(config: Config, platform: str) -> dict[str, float]:
    """Returns the row of a run: gigabytes sent in a step, the largest kinds of it, peak memory, TFLOPs of products."""
    mesh = config.mesh
    with on_devices(platform, mesh.data * mesh.fsdp * mesh.tensor):
        compiled = compiled_step(config)
    found, memory = count(compiled.as_text()), compiled.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    about = {"GB/step/device": found["bytes"] / 1e9, "peak GB": (peak + memory.temp_size_in_bytes) / 1e9}
    kinds = {kind: found.get(kind, 0.0) / 1e9 for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")}
    return about | {f"{kind} GB": value for kind, value in kinds.items()} | {"TFLOP": found["flops"] / 1e12}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", default="1.4b", help="60m, 130m, 350m, 1.4b of GPT-2, or 7b of Llama 2")
    options.add_argument("--mesh", default="1x8x1,2x2x2", help="data x fsdp x tensor, several with commas")
    options.add_argument("--optimizers", default="adam,orthoadam,muon", help=", ".join(OPTIMIZERS))
    options.add_argument("--accumulation", type=int, default=1, help="accumulation_steps")
    options.add_argument("--gather_table", action="store_true", help="mesh.gather_table")
    options.add_argument("--platform", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--tiny", action="store_true", help="a small model: shows that it runs")
    options.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments, rows = options.parse_args(), []
    meshes = [tuple(map(int, mesh.split("x"))) for mesh in arguments.mesh.split(",")]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={max(map(math.prod, meshes))}"
    for mesh in meshes:
        for optimizer in arguments.optimizers.split(","):
            config = config_of(arguments, optimizer, mesh)
            rows.append({"mesh": "x".join(map(str, mesh)), "optimizer": optimizer} | row(config, arguments.platform))
            against = next(of for of in rows if of["mesh"] == rows[-1]["mesh"])
            rows[-1]["/ first"] = rows[-1]["GB/step/device"] / against["GB/step/device"]
    show(f"Bytes that a device sends in a step, {arguments.model}", rows, arguments.json)


if __name__ == "__main__":
    main()
