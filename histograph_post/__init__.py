"""A better readout for a trained graph neural network, without retraining it."""

import lazy_loader

__version__ = "0.1.0"

# `__init__.pyi` lists the public names, for type checkers as well. They are imported on first use,
# so that `histograph --help` does not wait for torch.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
