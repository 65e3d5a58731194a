"""Bad images, without a library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path


def large_png(width: int = 20_000, height: int = 10_000) -> bytes:
    """A black image of 200 megapixels in a few kilobytes."""
    packer = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)  # the filter, then one bit per pixel
    pixels = b"".join(packer.compress(row) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


def broken_image(folder: Path) -> bytes:
    """The first half of a good one."""
    data = next(path for path in sorted(folder.rglob("*.png"))).read_bytes()
    return data[: len(data) // 2]
