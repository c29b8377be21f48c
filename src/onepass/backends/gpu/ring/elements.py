"""Arithmetic on elements in PTX, where the compiler's own code has more instructions.

While memory delivers an element, a multiprocessor has time for only about thirty instructions.
"""

from onepass.backends.gpu.device.activations import activate, activate_back

from .gluon import gl, jit

# z/(1 + exp(-z)). The compiler's own code has one more instruction, which changes a sign.
SILU = gl.constexpr("""{
    .reg .f32 t;
    mul.ftz.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.ftz.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 t, t;
    mul.ftz.f32 $0, $1, t;
}""")

# dy·(s + s·(z - z·s)) with s = 1/(1 + exp(-z)), the gradient of SiLU
SILU_BACK = gl.constexpr("""{
    .reg .f32 s, t;
    mul.ftz.f32 s, $2, 0fBFB8AA3B;
    ex2.approx.ftz.f32 s, s;
    add.ftz.f32 s, s, 0f3F800000;
    rcp.approx.ftz.f32 s, s;
    neg.f32 t, s;
    fma.rn.f32 t, t, $2, $2;
    fma.rn.f32 s, s, t, s;
    mul.f32 $0, $1, s;
}""")

# Two bfloat16 in one register to two float32. The compiler first takes the register apart, which doubles the instructions.
UNPACK = gl.constexpr("""{
    .reg .b32 low, high;
    shl.b32 low, $2, 16;
    and.b32 high, $2, 0xffff0000;
    mov.b32 $0, low;
    mov.b32 $1, high;
}""")


@jit
def as_float32(x):
    """Return x as float32. A thread must have an even number of contiguous elements."""
    if x.dtype == gl.bfloat16:
        x = gl.inline_asm_elementwise(UNPACK, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    else:
        x = x.to(gl.float32)
    return x


@jit
def activated(z, ACTIVATION: gl.constexpr):
    """Return activation(z)."""
    if ACTIVATION == "silu":
        z = gl.inline_asm_elementwise(SILU, "=f,f", [z], dtype=gl.float32, is_pure=True, pack=1)
    else:
        z = activate(z, ACTIVATION)
    return z


@jit
def slopes(x, dy, mean, rstd, gain, term, norm, mode: gl.constexpr):
    """Return x_hat, and dz, the gradient of z = x_hat·gain + term. (4), (32)

    With mode.from_y, x holds y: where the gain is 0, y says nothing about x_hat.
    """
    if mode.from_y:
        x_hat = gl.where(gain == 0.0, float("nan"), (x - term) / gain)
    elif norm.centered:
        x_hat = (x - mean) * rstd
    else:
        x_hat = x * rstd
    dz = dy
    if norm.activation == "silu":
        z = x_hat * gain + term
        dz = gl.inline_asm_elementwise(SILU_BACK, "=f,f,f", [dy, z], dtype=gl.float32, is_pure=True, pack=1)
    elif norm.activation != "":
        dz = activate_back(dy, x_hat * gain + term, norm.activation)
    return x_hat, dz


@jit
def beyond_reach(x, number, x_ptr, run, first, total, view, split):
    """Return a block with those elements that the descriptor does not reach: up to two rows at the end of the last run.

    `number` counts the elements of the block, and `first` is the number of its first element, from where the run is read.
    """
    if run.o == total - 1:
        at = first + number
        missing = (at < run.end) & (at >= split.reach)
        x = gl.where(missing, gl.load(x_ptr + run.start + at, mask=missing, other=0.0).to(x.dtype), x)
    return x
