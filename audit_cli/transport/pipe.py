"""Commands of this machine, and everything that is one: the system's ssh, docker exec, a wrapper."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import IO

from audit_cli.errors import host
from audit_cli.transport.base import LOST, MAX_ERR, Limits, Result, Sink


class Pipe:
    """Runs ``wrap(argv)`` as a child in a process group of its own."""

    def __init__(self, name: str = "local", wrap: Callable[[Sequence[str]], Sequence[str]] = list) -> None:
        self.name, self._wrap = name, wrap

    def run(
        self, argv: Sequence[str], stdin: bytes = b"", limits: Limits = Limits(), sink: Sink | None = None
    ) -> Result:
        command = list(self._wrap(argv))
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            raise host(
                "not-run",
                f"could not run {command[0]}",
                error.strerror or str(error),
                "is it there, and may you run it?",
            ) from None
        try:
            return _pump(child, stdin, limits, sink)
        finally:
            _end(child)

    def close(self) -> None:
        return None


def _pump(child: subprocess.Popen[bytes], stdin: bytes, limits: Limits, sink: Sink | None) -> Result:
    assert child.stdin and child.stdout and child.stderr
    out, err, taken, stopped = bytearray(), bytearray(), 0, ""
    rest = memoryview(stdin)
    start = heard = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for stream in (child.stdout, child.stderr):
            selector.register(stream, selectors.EVENT_READ)
        os.set_blocking(child.stdin.fileno(), False)
        if rest:
            selector.register(child.stdin, selectors.EVENT_WRITE)
        reading = 2
        while reading:
            now = time.monotonic()
            if now - heard > limits.idle or now - start > limits.total:
                stopped = "idle" if now - heard > limits.idle else "total"
                break
            for key, _ in selector.select(min(1.0, limits.idle)):
                if key.fileobj is child.stdin:
                    rest = _write(child.stdin, rest)
                    if not rest:
                        selector.unregister(child.stdin)
                    continue
                block = os.read(key.fd, 1 << 20)
                heard = time.monotonic()
                if not block:
                    selector.unregister(key.fileobj)
                    reading -= 1
                elif key.fileobj is child.stderr:
                    err = (err + block)[-MAX_ERR:]
                elif sink is not None:
                    taken += len(block)
                    sink(block)
                else:
                    taken += len(block)
                    out += block
            if taken > limits.max_bytes:
                stopped = "bytes"
                break
    if stopped:
        return Result(LOST, bytes(out), bytes(err), stopped)
    try:
        code = child.wait(max(0.1, limits.total - (time.monotonic() - start)))
    except subprocess.TimeoutExpired:
        return Result(LOST, bytes(out), bytes(err), "total")
    return Result(code if code >= 0 else LOST, bytes(out), bytes(err))


def _write(stream: IO[bytes], rest: memoryview) -> memoryview:
    try:
        return rest[os.write(stream.fileno(), rest[: 1 << 16]) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:
        return rest[len(rest) :]


def _end(child: subprocess.Popen[bytes]) -> None:
    """Close its pipes (our scripts end by that), then end its group if it is still there."""
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream:
            stream.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            child.wait(0.5)
            return
        except subprocess.TimeoutExpired:
            try:
                os.killpg(child.pid, number)
            except ProcessLookupError:
                return
    child.wait()
