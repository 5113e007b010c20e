"""Compiles for an H100 without having one, and estimates the time of the program from the bytes that its kernels move.

It needs JAX's CUDA plugin (`pip install "jax[cuda12]"`) and no GPU: XLA's choices of fusions and buffers are then those
of that GPU, without its autotuner. The estimate ranks variants: for the step of GPT-2 60M on an H200 (results/
benchmarks.md: 56.5 ms for 32,768 tokens) it gave 60 ms with that GPU's bandwidth.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
# What kernels reach: bytes/s of 3.35e12, FLOP/s of 989e12, cuDNN's attention (results/benchmarks.md), seconds a launch.
BYTES, FLOPS, ATTENTION_FLOPS, LAUNCH = 2.8e12, 680e12, 200e12, 1.5e-6
_WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
_SHAPE = re.compile(r"\b(pred|[suf]\d+|bf16)\[([\d,]*)\]")
_FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "conditional"}
_SLICES = {"dynamic-slice", "slice", "gather"}


class Operation(NamedTuple):
    """One instruction of a compiled program."""

    name: str
    type: str
    kind: str
    operands: list[str]
    attributes: str
    is_root: bool


def h100() -> Any:
    """Returns the sharding of arrays on an H100 that need not exist; an error says that the plugin is missing."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def estimate(program: str) -> dict[str, float]:
    """Estimates milliseconds of an optimised program, as text: all together, and by kind of kernel."""
    found = computations(program)
    milliseconds: dict[str, float] = collections.defaultdict(float)
    for kind, seconds in _kernels(found, found["ENTRY"]):
        milliseconds[kind] += 1e3 * seconds
    return {"estimated_ms": sum(milliseconds.values())} | {f"{kind}_ms": ms for kind, ms in milliseconds.items()}


def computations(program: str) -> dict[str, list[Operation]]:
    """Returns the instructions of every computation of a program, by name; that of the entry is ENTRY."""
    found: dict[str, list[Operation]] = {}
    for line in program.splitlines():
        if header := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line):
            current = found["ENTRY" if header[1] else header[2]] = []
        if not (match := re.match(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$", line)):
            continue
        operands, _, attributes = match[5].partition(")")
        names = re.findall(r"%([\w.\-]+)", operands)
        current.append(Operation(match[2], match[3], match[4], names, attributes, bool(match[1])))
    return found


def bytes_of(of: str) -> int:
    """Returns the bytes of a type, which may be a tuple."""
    return sum(_WIDTH[name] * math.prod(int(n) for n in dims.split(",") if n) for name, dims in _SHAPE.findall(of))


def _dimensions(of: str) -> list[int]:
    return [int(n) for n in _SHAPE.findall(of)[0][1].split(",") if n]


def _kernels(named: dict[str, list[Operation]], body: list[Operation]) -> Iterator[tuple[str, float]]:
    """Yields (kind, seconds) of every kernel, as often as its loop runs; branches of a conditional do not count."""
    types = {operation.name: operation.type for operation in body}
    for operation in body:
        if operation.kind == "while":
            times = re.search(r'known_trip_count":\{"n":"(\d+)"', operation.attributes)
            for kind, seconds in _kernels(named, named[_called(operation, "body")]):
                yield kind, seconds * int(times[1] if times else 1)
        elif operation.kind == "call":
            yield from _kernels(named, named[_called(operation, "to_apply")])
        elif operation.kind not in _FREE:
            yield _kernel(named, operation, types)


def _kernel(named: dict[str, list[Operation]], operation: Operation, types: dict[str, str]) -> tuple[str, float]:
    moved = bytes_of(operation.type) + sum(bytes_of(types.get(name, "")) for name in operation.operands)
    if "fmha" in operation.attributes:
        B, N, T, H = _dimensions(operation.type)  # forward 2 products, backward 5, half of them masked
        products = 5 if "Backward" in operation.attributes else 2
        return "attention", products * B * N * T * T * H / ATTENTION_FLOPS
    if operation.kind == "custom-call":
        flops = product_flops(operation, types)
        moved -= bytes_of(operation.type) if flops else 0  # of the tuple only the result is written, not the workspace
        return "product" if flops else "other", max(flops / FLOPS, moved / BYTES) + LAUNCH
    if operation.kind in ("dynamic-slice", "dynamic-update-slice"):
        moved = 2 * bytes_of(types[operation.operands[1]] if "update" in operation.kind else operation.type)
    if operation.kind != "fusion":
        return "copy" if operation.kind in ("copy", "transpose") else "other", moved / BYTES + LAUNCH
    body = named[_called(operation, "calls")]
    inner, moved = {o.name: o.type for o in body}, _fusion_bytes(body)
    dots = [o for o in body if o.kind == "dot"]
    flops = sum(product_flops(o, inner) for o in dots)
    return "product" if dots else "elementwise", max(flops / FLOPS, moved / BYTES) + LAUNCH


def _called(operation: Operation, key: str) -> str:
    found = re.search(key + r"=%?([\w.\-]+)", operation.attributes)
    assert found is not None
    return found[1]


def product_flops(operation: Operation, types: dict[str, str]) -> float:
    """Returns the FLOPs of a product, XLA's own or a library's, given the types of the operands; 0 of all others."""
    listed = r'lhs_contracting_dims=\{([\d,]*)\}|"lhs_contracting_dimensions":\[([^\]]*)\]'
    if not (found := re.search(listed, operation.attributes)):
        return 0.0
    left = _dimensions(types[operation.operands[0]])
    contracted = [int(n) for n in re.findall(r"\d+", found[1] or found[2] or "")]
    return 2.0 * math.prod(_dimensions(operation.type)) * math.prod(left[n] for n in contracted)


def _fusion_bytes(body: list[Operation]) -> int:
    """Counts what a fused kernel reads and writes: of a sliced operand the slice, of an updated one the update."""
    by_name = {operation.name: operation for operation in body}

    def origin(name: str) -> str:
        return origin(by_name[name].operands[0]) if by_name[name].kind in ("bitcast", "reshape") else name

    def read(parameter: Operation) -> int:
        whole, parts = bytes_of(parameter.type), 0
        for user in body:
            if user.kind in ("bitcast", "reshape") or parameter.name not in map(origin, user.operands):
                continue
            is_first = origin(user.operands[0]) == parameter.name
            updated = is_first and user.kind == "dynamic-update-slice"
            parts += 0 if updated else bytes_of(user.type) if is_first and user.kind in _SLICES else whole
        return min(parts, whole)

    def written(name: str) -> int:
        result = by_name[origin(name)]
        if result.kind == "dynamic-update-slice":
            return bytes_of(by_name[result.operands[1]].type)
        return 0 if result.kind == "parameter" else bytes_of(result.type)

    root = next(operation for operation in body if operation.is_root)
    results = root.operands if root.kind == "tuple" else [root.name]
    return sum(read(o) for o in body if o.kind == "parameter") + sum(map(written, results))
