"""Approximate float32 instructions: .approx and .full forms (PTX ISA 9.7.3).

The GPU interpolates in tables that are not published, so their last bits are the only results here that can differ from
an H200's.  Each function gives the correctly rounded value, special cases as on the GPU.  BOUNDS says how far an H200 was
seen to be from that; the conformance suite checks it against the record.
"""

import numpy as np

from .arithmetic import F32, F64, multiply_directed, where

# Name -> (units in the last place, absolute difference): a result is within one or the other.
BOUNDS = {
    "rcp.approx": (1, 0.0), "sqrt.approx": (1, 0.0), "rsqrt.approx": (1, 0.0), "div.approx": (1, 0.0), "div.full": (1, 0.0),
    "ex2.approx": (2, 0.0), "lg2.approx": (2, 2.0**-22), "sin.approx": (0, 2.0**-21), "cos.approx": (0, 2.0**-21),
    "tanh.approx": (128, 0.0),
}  # fmt: skip


def divide(a, b):
    """div.approx: a times the reciprocal of b, which is 0 for |b| above 2^126."""
    return where(np.abs(b) > F32(2**126), a * (F32(1) / where(np.isfinite(b), b * F32(np.inf), b)), a / b)


def _turns(x):
    """x / 2 pi, as the GPU reduces an angle: a product that rounds toward zero, then 25 bits after the point."""
    turns = np.asarray(multiply_directed(x, F32(0.15915494), "rz"), F64)
    return np.fmod(np.trunc(turns * 2.0**25) / 2.0**25, 1)


_FUNCTIONS = {
    "rsqrt": lambda x: 1 / np.sqrt(x.astype(F64)),
    "ex2": lambda x: np.exp2(x.astype(F64)),
    "lg2": lambda x: np.log2(x.astype(F64)),
    "sin": lambda x: np.sin(2 * np.pi * _turns(x)),
    "cos": lambda x: np.cos(2 * np.pi * _turns(x)),
    "tanh": lambda x: np.tanh(x.astype(F64)),
}


def evaluate(name, x):
    """rsqrt, ex2, lg2, sin, cos or tanh of float32."""
    return _FUNCTIONS[name](x).astype(F32)
