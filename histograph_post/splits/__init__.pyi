from .making import SPLIT_FORMS as SPLIT_FORMS
from .making import resolve_splits as resolve_splits
from .split import PARTS as PARTS
from .split import Split as Split
from .split import Splits as Splits
