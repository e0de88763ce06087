"""Models: a specification and a checkpoint come in, a module with its weights goes out.

Read ``building.py`` first (a specification becomes a module), then ``checkpoints.py`` (a file
becomes a state dict) and ``loading.py`` (the two agree on every tensor, or loading stops).
``spec.py`` names the model and its weights; ``model_call.py`` calls any model by the names in its
``forward`` and finds the prediction among its outputs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
