"""`python -m histograph_cli`, for launchers such as torchrun."""

import sys

# `python -m` puts the current folder first: a rich.py that lies there would be imported.
if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]

from .main import main

if __name__ == "__main__":
    main()
