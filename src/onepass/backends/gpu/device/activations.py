"""Activations and their gradients. (31) and (32) are equations of docs/theory.md."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))  # Triton's interpreter has no libdevice


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """Return y = act(z), the last step of (31)."""
    if ACTIVATION == "silu":
        z = over_one_plus_exp(z, z)
    elif ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # a nan stays a nan
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        z = over_one_plus_exp(z, 1.5957691216057308 * (z + 0.044715 * z * z * z))  # (1 + tanh(u))/2 = 1/(1 + exp(-2u))
    else:
        tl.static_assert(ACTIVATION == "")
    return z


@triton.jit
def over_one_plus_exp(z, u):
    """Return z/(1 + exp(-u)), in five instructions. The plain formula takes thirteen, which slows down float16 and bfloat16."""
    if INTERPRETED:
        return z / (1.0 + tl.exp(-u))
    else:
        return libdevice.fast_dividef(z, 1.0 + libdevice.fast_expf(-u))


@triton.jit
def activate_back(dy, z, ACTIVATION: tl.constexpr):
    """Return the gradient of z, dz = dy·act'(z). (32)"""
    if ACTIVATION == "silu":
        s = over_one_plus_exp(tl.full(z.shape, 1.0, tl.float32), z)
        dy = dy * (s * (1.0 + z * (1.0 - s)))
    elif ACTIVATION == "relu":
        dy = tl.where(z <= 0, 0.0, dy)
    elif ACTIVATION == "gelu":
        dy = dy * gelu_slope(z)
    elif ACTIVATION == "gelu_tanh":
        s = over_one_plus_exp(tl.full(z.shape, 1.0, tl.float32), 1.5957691216057308 * (z + 0.044715 * z * z * z))
        dy = dy * (s + z * (s * (1.0 - s)) * (1.5957691216057308 + 0.21406863 * z * z))
    else:
        tl.static_assert(ACTIVATION == "")
    return dy


@triton.jit
def gelu_slope(z):
    """Return the derivative of gelu, Φ(z) + z·φ(z). With `erf`, a backward has a quarter more instructions.

    Φ(-|z|) = exp(-z²/2)·q, where q is a polynomial in t = 1/(1 + 0.28·|z|). Its relative error is 1.7·10⁻⁷, found by least squares.
    """
    e, t = tl.exp(-0.5 * z * z), over_one_plus(0.28 * tl.abs(z))
    q = 0.024720103
    q = q * t - 0.093593589
    q = q * t + 0.092428782
    q = q * t - 0.0064496637
    q = q * t + 0.072775202
    q = q * t + 0.083630752
    q = q * t + 0.10308447
    q = q * t + 0.1116998
    q = (q * t + 0.11170386) * t
    return e * (0.3989422804014327 * z + tl.where(z < 0, q, -q)) + tl.where(z < 0, 0.0, 1.0)


@triton.jit
def over_one_plus(u):
    """Return 1/(1 + u), in two instructions."""
    if INTERPRETED:
        return 1.0 / (1.0 + u)
    else:
        return libdevice.fast_dividef(1.0, 1.0 + u)
