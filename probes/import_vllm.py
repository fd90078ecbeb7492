"""Import the installed vLLM: how long it takes, what it says, which plugins it loads. gpu: shared (the import may
touch a GPU).

Runs in the host's Python with its caches in a temporary folder that the caller removes. Plain Python 3.8; vLLM is the
only import."""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any, Dict


def take(arguments: Dict[str, Any]) -> Dict[str, Any]:
    """{"imported", "seconds", "version", "file", "plugins", "error"}: a failed import is an answer, with the end of
    its traceback."""
    start = time.monotonic()
    facts = {"imported": False, "python": sys.executable}  # type: Dict[str, Any]
    real, quiet = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # what an import prints must not reach the answer's stream
    try:
        import vllm

        facts.update(imported=True, version=str(getattr(vllm, "__version__", "")), file=str(vllm.__file__))
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        facts["plugins_loaded"] = True
    except BaseException as error:  # an import may even call sys.exit
        lines = traceback.format_exc().strip().splitlines()
        facts["error"] = "%s: %s" % (type(error).__name__, str(error)[:500])
        facts["traceback"] = lines[-12:]
    finally:
        os.dup2(real, 1)
        os.close(real)
        os.close(quiet)
    facts["seconds"] = round(time.monotonic() - start, 2)
    return facts
