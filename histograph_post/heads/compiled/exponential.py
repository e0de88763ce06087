"""The exponential of what is not positive, in operations that a compiler can make vectors of.

A call of the system's function is done value by value, ten times as slowly.
"""

from __future__ import annotations

import numpy as np

from .loops import ONE, ZERO, loop

#: exp(x) = 2^k exp(r) with x = k ln 2 + r; ln 2 in two parts, the first exact times any k.
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)

#: exp(r) = 1 + r + r^2 polynomial(r), for |r| <= ln 2 / 2, to the last bit (Cephes).
P0, P1 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3)
P2, P3 = np.float32(8.3334519073e-3), np.float32(4.1665795894e-2)
P4, P5 = np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)

#: Below this, the result is the smallest normal number and not zero.
LOWEST = np.float32(-87)

HALF = np.float32(0.5)
#: Where the exponent of a single precision number starts, and what is added to it.
EXPONENT_SHIFT, EXPONENT_BIAS = np.int32(23), np.int32(127)


@loop
def exponential(value: np.float32) -> np.float32:
    """Return ``exp(value)`` for a value that is not positive; NaN stays NaN."""
    if value < LOWEST:
        value = LOWEST
    power = np.floor(value * LOG2_E + HALF)
    rest = value - power * LN2_HIGH - power * LN2_LOW
    polynomial = ((((P0 * rest + P1) * rest + P2) * rest + P3) * rest + P4) * rest + P5
    fraction = polynomial * rest * rest + rest + ONE
    whole = np.int32(power if power == power else ZERO)  # there is no integer for NaN
    bits = np.int32((whole + EXPONENT_BIAS) << EXPONENT_SHIFT)
    return fraction * bits.view(np.float32)
