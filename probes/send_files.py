"""Send the bytes of files in one compressed stream: number (4 bytes), size (8 bytes, all ones: could not be read),
bytes. The standard library alone.

After the last file comes the number 2**32 - 1, so that a stream that was cut short is known for it.
"""

from __future__ import annotations

import os
import stat
import struct
import sys
import zlib
from typing import List, Tuple

UNREADABLE = (1 << 64) - 1
LAST = (1 << 32) - 1


def send(nonce: str, files: List[Tuple[int, str, int]], level: int) -> None:
    """``files``: (number, absolute path, size as the inventory had it). A file that has grown is cut there: its hash
    will tell."""
    out = sys.stdout.buffer
    pack = zlib.compressobj(level)
    out.write(("\x1eDD%s stream\n" % nonce).encode())
    for number, path, size in files:
        try:
            handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
            with os.fdopen(handle, "rb") as file:
                data = file.read(size) if stat.S_ISREG(os.fstat(handle).st_mode) else None
        except OSError:
            data = None
        out.write(pack.compress(struct.pack(">IQ", number, UNREADABLE if data is None else len(data)) + (data or b"")))
    out.write(pack.compress(struct.pack(">IQ", LAST, len(files))) + pack.flush())
    out.flush()
