"""TFRecord files and the tf.train.Example messages in them, read without TensorFlow.

A record is its length (uint64), the masked CRC of these eight bytes, the data and the masked CRC of the data, all
little-endian; the CRC is CRC-32C (Castagnoli, RFC 3720), masked by a rotation and a constant. Both are checked. The
format is that of tensorflow/core/lib/io/record_writer.h; the message that of tensorflow/core/example/example.proto.
"""

import functools
import operator
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from orthojax.errors import UserError

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, with its bits reversed
_BLOCK = 256  # bytes whose CRC is one lookup each, all at once
_HEADER = struct.Struct("<QI")


@functools.cache
def _tables() -> tuple[np.ndarray, list[list[int]], list[list[int]]]:
    """What byte b adds to a CRC that starts from zero, by how many bytes follow it.

    Returns:
      uint32 [_BLOCK * 256], the first byte of a block first; the same as lists for the last 8 bytes, the last one
      first, and for the first 4, the first one first.
    """
    byte = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        byte = np.where(byte & 1, (byte >> 1) ^ np.uint32(_POLYNOMIAL), byte >> 1)
    rows = [byte]
    for _ in range(_BLOCK - 1):
        rows.append((rows[-1] >> 8) ^ byte[rows[-1] & 255])
    last = [row.tolist() for row in rows[:8]]
    return np.stack(rows[::-1]).reshape(-1), last, [row.tolist() for row in rows[:-5:-1]]


_OFFSETS = np.arange(_BLOCK, dtype=np.int64) * 256


def crc32c(data: bytes) -> int:
    """CRC-32C of some bytes.

    A CRC is linear over XOR, so the bytes of a block are looked up independently, which NumPy does at once.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table, last, first = _tables()
    if len(data) < 4:
        crc = 0xFFFFFFFF
        for byte in data:
            crc = (crc >> 8) ^ last[0][(crc ^ byte) & 255]
        return crc ^ 0xFFFFFFFF
    # The initial value 0xffffffff is the same as inverting the first four bytes and starting from zero; and a CRC that
    # starts from zero does not see leading zero bytes, so the first block may be filled up with them.
    head = bytes(byte ^ 255 for byte in data[:4])
    if len(data) <= 8:
        message = head + data[4:]
        return functools.reduce(operator.xor, map(list.__getitem__, reversed(last[: len(data)]), message)) ^ 0xFFFFFFFF
    blocks = np.zeros(-(-len(data) // _BLOCK) * _BLOCK, np.uint8)
    begin = len(blocks) - len(data)
    blocks[begin:] = np.frombuffer(data, np.uint8)
    blocks[begin : begin + 4] ^= 255
    parts = np.bitwise_xor.reduce(table.take(blocks.reshape(-1, _BLOCK) + _OFFSETS), axis=1)
    crc = 0
    for part in parts.tolist():  # the CRC so far acts on a block as if its first four bytes were XORed with it
        crc = first[0][crc & 255] ^ first[1][crc >> 8 & 255] ^ first[2][crc >> 16 & 255] ^ first[3][crc >> 24] ^ part
    return crc ^ 0xFFFFFFFF


def masked_crc32c(data: bytes) -> int:
    """The CRC as it is stored in a TFRecord: rotated right by 15 bits, plus a constant."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def read_records(path: Path, skip: int = 0) -> Iterator[bytes]:
    """The records of a file, in order.

    Args:
      path: The file.
      skip: So many records are passed over, reading their lengths only.

    Raises:
      UserError: Where the file cannot be read, ends within a record, or a CRC does not match.
    """
    number = offset = 0
    try:
        with open(path, "rb") as file:
            while header := file.read(_HEADER.size):
                length = _length(header)
                if number < skip:
                    file.seek(length + 4, 1)
                else:
                    yield _data(file, length)
                number, offset = number + 1, offset + _HEADER.size + length + 4
    except ValueError as error:
        raise UserError(
            f"record {number} of {path}, at byte {offset}, {error}", hint="no TFRecord file, or fetch it again"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _length(header: bytes) -> int:
    if len(header) < _HEADER.size:
        raise ValueError("is cut short")
    length, crc = _HEADER.unpack(header)
    if masked_crc32c(header[:8]) != crc:
        raise ValueError("has a damaged length")
    return length


def _data(file: IO[bytes], length: int) -> bytes:
    content = file.read(length + 4)
    if len(content) < length + 4:
        raise ValueError("is cut short")
    data = content[:length]
    if masked_crc32c(data) != int.from_bytes(content[length:], "little"):
        raise ValueError("does not have its checksum")
    return data


def bytes_feature(example: bytes, name: str) -> bytes | None:
    """The first value of a bytes feature of a serialized tf.train.Example; None where there is none of that name.

    Raises:
      ValueError: Where the bytes are no such message.
    """
    wanted = name.encode()
    for features in _fields(example, 1):
        for entry in _fields(features, 1):
            if next(_fields(entry, 1), b"") == wanted:
                lists = [part for feature in _fields(entry, 2) for part in _fields(feature, 1)]
                return next((value for part in lists for value in _fields(part, 1)), None)
    return None


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


def _fields(message: bytes, number: int) -> Iterator[bytes]:
    """The contents of every length-delimited field of that number; others are passed over."""
    position, size = 0, len(message)
    try:
        while position < size:
            key, position = message[position], position + 1
            if key > 127:
                key, position = _varint(message, position - 1)
            kind = key & 7
            if kind == 2:
                length, position = message[position], position + 1
                if length > 127:
                    length, position = _varint(message, position - 1)
                begin, position = position, position + length
                if position > size:
                    raise ValueError("a field runs past the end")
                if key >> 3 == number:
                    yield message[begin:position]
            elif kind == 0:
                _, position = _varint(message, position)
            elif kind in (1, 5):
                position += 8 if kind == 1 else 4
            else:
                raise ValueError(f"a field of wire type {kind}")
    except IndexError:
        raise ValueError("a number runs past the end") from None
