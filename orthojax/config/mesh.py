"""The devices as values."""

import dataclasses
import math

from orthojax.config.checks import require
from orthojax.config.fields import check_types, setting


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How the devices of a run are arranged; -1, in one of the sizes, takes all devices that the others leave.

    The numbers of a run do not depend on it, beyond rounding, and a checkpoint can be resumed on another mesh.

    Attributes:
      data: Groups of devices that each have all parameters and their own rows of the batch. Each keeps and updates one
        part of the optimizer's moments (ZeRO stage 1).
      fsdp: Devices that share parameters, gradients and moments between them, and have their own rows (ZeRO stage 3).
      tensor: Devices that share heads, MLP width and vocabulary, and work on the same rows (tensor parallelism).
    """

    data: int = setting(1, affects="computation")
    fsdp: int = setting(1, affects="computation")
    tensor: int = setting(1, affects="computation")

    def __post_init__(self):
        check_types(self, "mesh")
        sizes = {"data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh.{name}={size}", "at least 1, or -1 for all devices left")
        require(
            list(sizes.values()).count(-1) <= 1, f"mesh {sizes} has more than one -1", "-1 in at most one of the sizes"
        )

    def sizes(self, device_count: int) -> tuple[int, int, int]:
        """(data, fsdp, tensor) on this many devices.

        Raises:
          UserError: Where there are too few, or the rest does not divide.

        >>> MeshConfig(data=-1, tensor=2).sizes(8)
        (4, 1, 2)
        """
        given = math.prod(size for size in (self.data, self.fsdp, self.tensor) if size != -1)
        text = f"mesh data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}"
        require(
            given <= device_count,
            f"{text} needs {given} devices, and there {'is' if device_count == 1 else 'are'} {device_count}",
            f"sizes whose product is at most {device_count}; -1 takes all devices that the others leave",
        )
        if -1 in (self.data, self.fsdp, self.tensor):
            require(
                device_count % given == 0,
                f"{text}: {given} does not divide the {device_count} devices",
                f"other sizes whose product divides {device_count}",
            )
        data, fsdp, tensor = (
            device_count // given if size == -1 else size for size in (self.data, self.fsdp, self.tensor)
        )
        return data, fsdp, tensor
