from .checks import LayerParity as LayerParity
from .checks import Parity as Parity
from .checks import check_parity as check_parity
from .plan import plan_capture as plan_capture
from .points import CapturePlan as CapturePlan
from .points import CapturePoint as CapturePoint
from .recorder import Capture as Capture
from .recorder import Captured as Captured
