"""Several processes, on one machine or many, as one run; `jax.distributed` finds and watches them."""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar, cast

import jax
import numpy as np

from orthojax.errors import UserError

T = TypeVar("T")


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 100,
) -> None:
    """Joins the processes of a run; call it before anything else of JAX.

    A process that dies is noticed by its missing heartbeat, and ends all others; they go on from the last checkpoint
    when they are started again. Where the others do not come within five minutes JAX ends this one, with exit code 134.

    Args:
      coordinator_address: HOST:PORT of process 0. None asks the cluster (Slurm, Open MPI, GKE, Cloud TPU) for all.
      num_processes: Of all machines together.
      process_id: 0 to num_processes - 1.
      heartbeat_timeout_seconds: Silence after which a process counts as dead.

    Raises:
      UserError: Where only some of the three are given, no cluster is found, or the address cannot be used.
    """
    given = [coordinator_address, num_processes, process_id]
    if any(value is None for value in given) and any(value is not None for value in given):
        raise UserError(
            f"coordinator_address={coordinator_address}, num_processes={num_processes}, process_id={process_id}",
            allowed="all three, or none of them on a cluster that jax.distributed knows",
        )
    if num_processes is not None and process_id is not None and not 0 <= process_id < num_processes:
        raise UserError(f"process_id={process_id} of {num_processes} processes", allowed=f"0 to {num_processes - 1}")
    if coordinator_address is not None:
        _require_address(coordinator_address)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            heartbeat_timeout_seconds=heartbeat_timeout_seconds,
            shutdown_timeout_seconds=heartbeat_timeout_seconds,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"the processes do not come together: {str(error).strip().splitlines()[0]}",
            allowed="a cluster that jax.distributed knows: Slurm, Open MPI, GKE, Cloud TPU",
            hint="elsewhere --coordinator_address=HOST:PORT --num_processes=N --process_id=I",
        ) from error


def _require_address(address: str) -> None:
    """Refuses what is no HOST:PORT, which would crash in JAX, and unknown hosts, for which it would wait."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise UserError(f"coordinator_address={address}", allowed="HOST:PORT of process 0, with a port of 1 to 65535")
    try:
        socket.getaddrinfo(host.strip("[]"), int(port))
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"coordinator_address={address}: {error}", allowed="HOST:PORT of process 0, by a name known here"
        ) from error


def is_primary() -> bool:
    """Whether this is process 0, which alone writes config.json, metrics and to the console."""
    return jax.process_index() == 0


def begin_together(prepare: Callable[[], T], same: Mapping[str, str] = MappingProxyType({})) -> T:
    """Calls a function on every process, and goes on where it succeeds on all and all are about to do the same.

    One that fails alone, or trains with another config or on other data, would be noticed by nobody: the others would
    wait for it, or take its gradients for those of their own run.

    Args:
      prepare: Called here; an exception of it ends all processes.
      same: What must not differ between processes, by name.

    Returns:
      What `prepare` returned.

    Raises:
      UserError: Which processes failed in `prepare`, or differ from process 0 and in what; here, what `prepare` raised.
    """
    prepared = failure = None
    try:
        prepared = prepare()
    except Exception as error:
        failure = error
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        digests = [hashlib.sha256(value.encode()).digest() for value in same.values()]
        own = np.frombuffer(bytes([failure is not None]) + b"".join(digests), np.uint8)
        rows = np.asarray(multihost_utils.process_allgather(own))
        _require_agreement(rows, list(same))
        failed = np.flatnonzero(rows[:, 0])
        if failure is None and failed.size:
            raise UserError(f"process {', '.join(map(str, failed))} cannot begin", hint="its own message says why")
    if failure is not None:
        raise failure
    return cast(T, prepared)


def from_primary(read: Callable[[], T]) -> T:
    """What a function gives on process 0, which alone calls it, on every process; JSON values."""
    value = read() if is_primary() else None
    if jax.process_count() == 1:
        return cast(T, value)
    from jax.experimental import multihost_utils

    content = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(content.size)))
    content = content if is_primary() else np.zeros(size, np.uint8)
    return json.loads(bytes(np.asarray(multihost_utils.broadcast_one_to_all(content))))


def _require_agreement(rows: np.ndarray, names: list[str]) -> None:
    """Of uint8 [processes, 1 + 32 * names]: whether a process failed, and the sha256 of everything named.

    Differences are told before failures: a process of another config may fail for what process 0 has just written.
    """
    digests = rows[:, 1:].reshape(len(rows), len(names), 32)
    differs = (digests != digests[0]).any(axis=-1)
    told = [
        f"{name} of process {', '.join(map(str, np.flatnonzero(column)))}"
        for name, column in zip(names, differs.T, strict=True)
        if column.any()
    ]
    if told:
        raise UserError(
            f"the processes are not of one run: not as that of process 0 are {' and '.join(told)}",
            allowed="the same config, the same files and the same version of Python on every machine",
        )
