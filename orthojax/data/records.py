"""Records of TFRecord and ArrayRecord files, checked against their checksums and their number.

The `array_record` package reads ArrayRecord. TFRecord is read here: without TensorFlow, TFDS does not read it, and the
reader of `grain` does not compare checksums. A TFRecord is a length (uint64), its masked CRC, the data and their masked
CRC, all little-endian (tensorflow/core/lib/io/record_writer.h).
"""

import contextlib
import functools
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orthojax.errors import UserError

REFETCH = "fetch the file again"
_READ_AT_ONCE = 1 << 21  # bytes of an ArrayRecord, by the mean size of its records
_HEADER = struct.Struct("<QI")
_CRC_BLOCK = 512  # bytes whose CRC is one vectorised table look-up


def read_tfrecord(path: Path, count: int, start: int, stop: int) -> Iterator[bytes]:
    """The records [start, stop) of `count`, or fewer at the end of the file; of those before only lengths are read."""
    number = offset = 0
    try:
        with open(path, "rb", buffering=1 << 18) as file:
            size = os.fstat(file.fileno()).st_size
            while number < stop and (header := file.read(_HEADER.size)):
                length, crc = _HEADER.unpack(header.ljust(_HEADER.size))
                if len(header) == _HEADER.size and _masked_crc_of_length(header[:8]) != crc:
                    raise ValueError("has a corrupt length")
                end = offset + _HEADER.size + length + 4
                if end > size:
                    raise ValueError("is cut short")
                if number < start:
                    file.seek(end)
                else:
                    data = file.read(length + 4)
                    if masked_crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
                        raise ValueError("does not match its checksum")
                    yield data[:-4]
                number, offset = number + 1, end
            if number == count and offset < size:
                problem = f"{path} goes on after the {count} records of dataset_info.json"
                raise UserError(problem, hint=REFETCH)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(
            f"record {number} of {path}, at byte {offset}, {error}", hint="not a TFRecord file, or fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_array_record(paths: list[Path], lengths: list[int], size: float, start: int, stop: int) -> Iterator[bytes]:
    """The records [start, stop) of all files together, of so many each and of about a size."""
    from array_record.python.array_record_module import ArrayRecordReader

    at_once = round(_READ_AT_ONCE / min(max(size, 1), _READ_AT_ONCE))
    first = 0
    for path, count in zip(paths, lengths, strict=True):
        begin, end = max(start - first, 0), min(stop - first, count)
        if begin < end or (count == 0 and start <= first <= stop):
            try:  # ranges are read as they are asked for: reading ahead would read twice
                with contextlib.closing(ArrayRecordReader(str(path), "readahead_buffer_size:0")) as reader:
                    if (found := reader.num_records()) != count:
                        raise ValueError(f"it has {found} records, not {count} as in dataset_info.json")
                    for i in range(begin, end, at_once):
                        yield from reader.read(i, min(i + at_once, end))
            except (IndexError, RuntimeError, ValueError) as error:
                raise UserError(f"{path} is corrupt: {str(error).splitlines()[0][:200]}", hint=REFETCH) from None
        first += count


def crc32c(data: bytes) -> int:
    """CRC-32C (Castagnoli, RFC 3720) of some bytes.

    A CRC is linear over XOR, so the bytes of a block are looked up independently of each other.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    # A CRC that starts from zero ignores leading zero bytes, and `_INITIAL` turns it into the initial 0xffffffff.
    padded = bytes(-(len(data) + len(_INITIAL)) % _CRC_BLOCK) + _INITIAL + data
    places = np.frombuffer(padded, np.uint8).reshape(-1, _CRC_BLOCK) + _OFFSETS
    table, (a, b, c, d) = _crc_tables()
    crc = 0
    for block in np.bitwise_xor.reduce(table.take(places, mode="clip"), axis=1).tolist():
        # The CRC so far acts on a block as if its first four bytes were XORed with it.
        crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ block
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """CRC-32C as TFRecord stores it: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


_INITIAL = bytes.fromhex("54641f64")  # whose CRC, starting from zero, is 0xffffffff
_OFFSETS = np.arange(_CRC_BLOCK, dtype=np.int64) * 256
_masked_crc_of_length = functools.lru_cache(1 << 14)(masked_crc32c)  # lengths repeat


@functools.cache
def _crc_tables() -> tuple[np.ndarray, list[list[int]]]:
    """What each byte value adds to a CRC by its place in a block: uint32 [_CRC_BLOCK * 256], and the first 4 places."""
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(0x82F63B78), byte >> 1)
    rows = [byte]
    for _ in range(_CRC_BLOCK - 1):
        rows.append((rows[-1] >> 8) ^ byte[rows[-1] & 255])
    table = np.stack(rows[::-1])
    return table.reshape(-1), table[:4].tolist()
