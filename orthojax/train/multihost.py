"""Several processes, on one machine or many, as one run; `jax.distributed` finds and watches them."""

import socket

import jax

from orthojax.errors import UserError


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
