"""TFRecord files and the tf.train.Example messages in them, read without TensorFlow.

A record is its length (uint64), the masked CRC of these eight bytes, the data and the masked CRC of the data, all
little-endian; the CRC is CRC-32C (Castagnoli, RFC 3720), masked by a rotation and a constant. Both are checked. The
format is that of tensorflow/core/lib/io/record_writer.h; the message that of tensorflow/core/example/example.proto.
"""

import functools
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from orthojax.errors import UserError

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, with its bits reversed
_BLOCK = 512  # bytes whose CRC is one lookup each, all at once
_ROWS = 64  # blocks at once, so that what is made of them stays in a core's cache
_GROUP = 1 << 18  # bytes of records that are checked at once
_HEADER = struct.Struct("<QI")


@functools.cache
def _tables() -> tuple[np.ndarray, list[list[int]], list[int]]:
    """What byte b adds to a CRC that starts from zero, by how many bytes follow it.

    Returns:
      uint32 [_BLOCK * 256], the first byte of a block first; the same as lists for its first 4 bytes; and for its last.
    """
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_POLYNOMIAL), byte >> 1)
    rows = [byte]
    for _ in range(_BLOCK - 1):
        rows.append((rows[-1] >> 8) ^ byte[rows[-1] & 255])
    return np.stack(rows[::-1]).reshape(-1), [row.tolist() for row in rows[:-5:-1]], byte.tolist()


_OFFSETS = np.arange(_BLOCK, dtype=np.int64) * 256


def crc32c(data: bytes) -> int:
    """CRC-32C of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    return crc32c_of_each([data])[0]


def crc32c_of_each(messages: Sequence[bytes]) -> list[int]:
    """CRC-32C of every message.

    A CRC is linear over XOR, so the bytes of a block are looked up independently, which NumPy does at once for the
    blocks of all messages: one by one, most of the time would go into calls.
    """
    # The initial value 0xffffffff is the same as inverting the first four bytes and starting from zero; and a CRC that
    # starts from zero does not see leading zero bytes, so the first block may be filled up with them.
    long = [message for message in messages if len(message) >= 4]
    parts = [part for message in long for part in (bytes(-len(message) % _BLOCK), message)]
    blocks = np.frombuffer(bytearray().join(parts), np.uint8)
    ends = np.cumsum([-(-len(message) // _BLOCK) for message in long], dtype=np.int64)
    begins = ends * _BLOCK - np.array([len(message) for message in long], np.int64)
    blocks[(begins[:, None] + np.arange(4)).reshape(-1)] ^= 255
    sums = _block_sums(blocks.reshape(-1, _BLOCK))
    (a, b, c, d), block, found = _tables()[1], 0, []
    for end in ends.tolist():
        crc = 0
        for part in sums[block:end]:  # the CRC so far acts on a block as if its first four bytes were XORed with it
            crc = a[crc & 255] ^ b[crc >> 8 & 255] ^ c[crc >> 16 & 255] ^ d[crc >> 24] ^ part
        found.append(crc ^ 0xFFFFFFFF)
        block = end
    if len(long) == len(messages):
        return found
    rest = iter(found)
    return [_short_crc32c(message) if len(message) < 4 else next(rest) for message in messages]


def _block_sums(blocks: np.ndarray) -> list[int]:
    """The CRC of every row of uint8 [n, _BLOCK], started from zero."""
    table, sums = _tables()[0], []
    for first in range(0, len(blocks), _ROWS):
        places = blocks[first : first + _ROWS] + _OFFSETS
        sums += np.bitwise_xor.reduce(table.take(places, mode="clip"), axis=1).tolist()
    return sums


def _short_crc32c(data: bytes) -> int:
    crc, last = 0xFFFFFFFF, _tables()[2]
    for byte in data:
        crc = (crc >> 8) ^ last[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def masked_crc(crc: int) -> int:
    """A CRC as a TFRecord stores it: rotated right by 15 bits, plus a constant."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@functools.lru_cache(1 << 14)  # lengths come again
def masked_crc32c(data: bytes) -> int:
    """The masked CRC of a few bytes."""
    return masked_crc(_short_crc32c(data))


def read_records(path: Path, skip: int = 0) -> Iterator[bytes]:
    """The records of a file, in order.

    Args:
      path: The file.
      skip: So many records are passed over, reading their lengths only.

    Raises:
      UserError: Where the file cannot be read, ends within a record, or a CRC does not match; the records before that
        one are given first.
    """
    number, offset, problem = 0, 0, ""
    try:
        with open(path, "rb", buffering=_GROUP) as file:
            while number < skip and (header := file.read(_HEADER.size)):
                length = _length(header)
                file.seek(length + 4, 1)
                number, offset = number + 1, offset + _HEADER.size + length + 4
            while not problem:
                contents, problem = _read_group(file)
                if not contents and not problem:
                    return
                sums = crc32c_of_each([content[:-4] for content in contents])
                for content, crc in zip(contents, sums, strict=True):
                    if masked_crc(crc) != int.from_bytes(content[-4:], "little"):
                        raise ValueError("does not have its checksum")
                    yield content[:-4]
                    number, offset = number + 1, offset + _HEADER.size + len(content)
            raise ValueError(problem)
    except ValueError as error:
        raise UserError(
            f"record {number} of {path}, at byte {offset}, {error}", hint="no TFRecord file, or fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _read_group(file: IO[bytes]) -> tuple[list[bytes], str]:
    """The next records, each with its CRC at its end, not compared yet; and what is wrong with the one after them."""
    contents, size = [], 0
    try:
        while size < _GROUP and (header := file.read(_HEADER.size)):
            length = _length(header) + 4
            content = file.read(length)
            if len(content) < length:
                raise ValueError("is cut short")
            contents.append(content)
            size += length
    except ValueError as error:
        return contents, str(error)
    return contents, ""


def _length(header: bytes) -> int:
    if len(header) < _HEADER.size:
        raise ValueError("is cut short")
    length, crc = _HEADER.unpack(header)
    if masked_crc32c(header[:8]) != crc:
        raise ValueError("has a damaged length")
    return length


def as_varint(value: int) -> bytes:
    """A number from 0 on as a protocol buffer message stores it: seven bits a byte, the lowest first."""
    low, rest = value & 127, value >> 7
    return bytes([low | 128]) + as_varint(rest) if rest else bytes([low])


def bytes_feature(example: bytes, name: str) -> list[bytes]:
    """The values of a bytes feature of a serialized tf.train.Example; [] where there is none of that name.

    Raises:
      ValueError: Where the bytes are no such message.
    """
    wanted = name.encode()
    key = b"\n" + as_varint(len(wanted)) + wanted  # as an entry begins where its key stands first, which is usual
    for features in _fields(example, 0, len(example), 1):
        for begin, end in _fields(example, *features, 1):
            if example.startswith(key, begin, end) or (
                not example.startswith(b"\n", begin, end)
                and any(example[slice(*span)] == wanted for span in _fields(example, begin, end, 1)[:1])
            ):
                return [
                    example[slice(*value)]
                    for feature in _fields(example, begin, end, 2)
                    for values in _fields(example, *feature, 1)
                    for value in _fields(example, *values, 1)
                ]
    return []


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


def _fields(data: bytes, position: int, end: int, number: int) -> list[tuple[int, int]]:
    """Where the contents of every length-delimited field of that number begin and end; others are passed over.

    The message is data[position:end].
    """
    found = []
    try:
        while position < end:
            key, position = data[position], position + 1
            if key > 127:
                key, position = _varint(data, position - 1)
            kind = key & 7
            if kind == 2:
                length, position = data[position], position + 1
                if length > 127:
                    length, position = _varint(data, position - 1)
                begin, position = position, position + length
                if key >> 3 == number:
                    found.append((begin, position))
            elif kind == 0:
                _, position = _varint(data, position)
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                raise ValueError(f"a field of wire type {kind}")
    except IndexError:
        raise ValueError("a number runs past the end") from None
    if position > end:
        raise ValueError("a field runs past the end")
    return found
