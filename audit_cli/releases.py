"""Published wheels that were read whole once, by the sha256 of the file: the same bytes need not be unpacked again to
know what is in them.

``data/releases.json.gz`` ships with the package: sha256 of the wheel -> sha256 of each binary -> its op schemas. A
wheel that it names was found to be as its own RECORD says when the list was made, so that RECORD's hashes are facts
for it. Made with ``python -m audit_cli.releases``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from importlib import resources
from pathlib import Path

Schemas = dict[str, list[str] | None]
_NAME = "releases.json.gz"


def sha256_of(path: Path) -> str:
    """Of a file, a block at a time. Raises OSError."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def schemas_of(wheel_sha256: str) -> Schemas | None:
    """The op schemas of the binaries of a wheel that is known, by their sha256; None for one that isn't."""
    try:
        data = json.loads(gzip.decompress(resources.files("audit_cli").joinpath("data", _NAME).read_bytes()))
    except (OSError, ValueError):
        return None
    wheel = data["wheels"].get(wheel_sha256)
    if wheel is None:
        return None
    return {
        binary: None if found is None else [data["schemas"][number] for number in found]
        for binary, found in wheel.items()
    }


def main() -> None:
    """Read every vLLM wheel of a folder (by default, the cache's) and write the list. A wheel that differs from its
    RECORD is left out."""
    import tempfile

    from audit_cli.archive import Wheel
    from audit_cli.paths import cache_dir

    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else cache_dir() / "wheels"
    numbers: dict[str, int] = {}
    wheels = {}
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted(folder.glob("vllm-*.whl")):
            wheel = Wheel(path, Path(scratch), trust=False)
            if wheel.data["record"]["status"] != "clean":
                print(f"left out: {path.name} differs from its RECORD")
                continue
            wheels[sha256_of(path)] = {
                binary: None if found is None else [numbers.setdefault(text, len(numbers)) for text in found]
                for binary, found in sorted(wheel.schemas.items())
            }
            print(path.name, flush=True)
    body = json.dumps({"schemas": list(numbers), "wheels": wheels}, separators=(",", ":"))
    (Path(__file__).parent / "data" / _NAME).write_bytes(gzip.compress(body.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
