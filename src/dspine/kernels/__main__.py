"""`python -m dspine.kernels`: build and test the CPU kernels for the library that would be used."""

from __future__ import annotations

import sys

from dspine.errors import DspineError
from dspine.kernels.status import prepare
from dspine.llama.library import find_library


def main() -> int:
    try:
        status = prepare(find_library().path)
    except DspineError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.write(f"CPU kernels: {status.text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
