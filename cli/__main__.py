"""`python -m histograph_cli`, for launchers such as torchrun."""

from .main import main

if __name__ == "__main__":
    main()
