"""The checksums as an item of the same Orbax step: they commit with what they guard, or not at all."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import future

from orthojax.train.checkpoint.checksums import ALGORITHM, copy_to_host, describe_array, json_checksum, parts_sum


class ChecksumHandler(ocp.AsyncCheckpointHandler):
    """Writes `checksums/metadata`, and `checksums/process_N` for every process N but the first.

    The main thread only fetches the arrays to the host, which Orbax does anyway before the training goes on; sums and
    files are made in the background.
    """

    @classmethod
    def typestr(cls) -> str:
        """On disk it is plain JSON: readers without orthojax find it so."""
        return ocp.JsonCheckpointHandler.typestr()

    async def async_save(self, directory: Any, args: "ChecksumSave") -> list[Any]:  # pyright: ignore
        """Called by Orbax; returns what the commit of the step waits for."""
        on_host = copy_to_host(args.trees)
        header = {"algorithm": ALGORITHM, "processes": jax.process_count()}
        header["json"] = {name: json_checksum(values) for name, values in args.values.items()}
        dtypes = {item: [leaf.dtype for leaf in jax.tree.leaves(tree)] for item, tree in args.trees.items()}

        async def write() -> None:
            sums = {
                item: {
                    path: f"{describe_array(shape, dtype)} {parts_sum(shape, parts):016x}"
                    for (path, (shape, parts)), dtype in zip(arrays.items(), dtypes[item], strict=True)
                }
                for item, arrays in on_host.items()
            }
            content = header | sums
            content["own"] = json_checksum(content)  # of this very file
            (directory / file_name(jax.process_index())).write_text(json.dumps(content))

        return [future.CommitFutureAwaitingContractedSignals(write(), name="checksums")]

    def save(self, directory: Any, args: "ChecksumSave") -> None:
        """Orbax's interface has it; it asks an asynchronous handler through `async_save` alone."""
        raise NotImplementedError("checkpoints are written in the background")

    def restore(self, directory: Any, args: Any = None) -> Any:
        """What process 0 wrote."""
        return json.loads((directory / file_name(0)).read_text())


@dataclasses.dataclass
class ChecksumSave(ocp.args.CheckpointArgs):
    """What the checksums are of.

    Attributes:
      trees: Item -> tree of arrays.
      values: Item -> JSON values.
    """

    trees: Mapping[str, Any]
    values: Mapping[str, Any]


def registry() -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """What an Orbax manager needs to know to write the item; the other items it knows."""
    known = ocp.handlers.DefaultCheckpointHandlerRegistry()
    known.add("checksums", ChecksumSave, ChecksumHandler())
    return known


def file_name(process: int) -> str:
    """The file of a process in the folder of the item; the first one's is where Orbax keeps any JSON item."""
    return "metadata" if process == 0 else f"process_{process}"
