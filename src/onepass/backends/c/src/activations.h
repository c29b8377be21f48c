/* The activations and their slopes, a vector at a time. */
#pragma once
#include "numbers.h"

static inline V chosen(Bits where, V a, V b) { return (V)((where & (Bits)a) | (~where & (Bits)b)); }

/* x, not below or not above a limit; NaN stays. */
#if defined(__AVX512F__)
static inline V not_below(V x, float limit) { return (V)_mm512_max_ps(_mm512_set1_ps(limit), (__m512)x); }
static inline V not_above(V x, float limit) { return (V)_mm512_min_ps(_mm512_set1_ps(limit), (__m512)x); }
#elif defined(__AVX__)
static inline V not_below(V x, float limit) { return (V)_mm256_max_ps(_mm256_set1_ps(limit), (__m256)x); }
static inline V not_above(V x, float limit) { return (V)_mm256_min_ps(_mm256_set1_ps(limit), (__m256)x); }
#else
static inline V not_below(V x, float limit) { return chosen((Bits)(x < limit), (V){0} + limit, x); }
static inline V not_above(V x, float limit) { return chosen((Bits)(x > limit), (V){0} + limit, x); }
#endif

/* exp to 1 ulp; 0 below -87.3, infinite above 88.7. Adding 1.5·2^23 rounds x/ln 2 to an integer k, exp x = 2^k·exp(x - k·ln 2): no fast-math. */
static inline V exponential(V x) {
    x = not_above(not_below(x, -88.0f), 89.0f);
    V shifted = x * 1.44269504f + 12582912.0f, k = shifted - 12582912.0f;
    V r = x - k * 0.693359375f + k * 2.12194440e-4f;
    V p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (V)(((Bits)shifted + 127u) << 23);
}

static inline V sigmoid(V z) { return 1.0f / (1.0f + exponential(-z)); }

/* The normal distribution's Φ(z) and, by the way, exp(-z²/2). With v = |z|/√2: below 1, Φ = 1/2 + erf(z/√2)/2 and erf v = v·p(v²); above, Φ(-|z|) =
   erfc(v)/2 and erfc(v)·exp(v²) = t·q(t), t = 1/(1 + 0.4v). p and q are fitted to relative errors of 1e-9 and 9e-8. */
static inline V phi(V z, V *bell) {
    V v = (V)((Bits)z & 0x7fffffffu) * 0.70710678f, t = 1.0f / (1.0f + 0.4f * v), s = v * v;
    V q = t * 0.04596281424164772f - 0.16303355991840363f;
    q = q * t + 0.13044635951519012f;
    q = q * t + 0.035491082817316055f;
    q = q * t + 0.11543142050504684f;
    q = q * t + 0.17849509418010712f;
    q = q * t + 0.20560678839683533f;
    q = q * t + 0.22593723237514496f;
    q = q * t + 0.22566287219524384f;
    V p = s * 7.853859278839082e-05f - 0.0008010193123482168f;
    p = p * s + 0.005188327748328447f;
    p = p * s - 0.026853810995817184f;
    p = p * s + 0.1128358542919159f;
    p = p * s - 0.3761262595653534f;
    p = p * s + 1.1283791065216064f;
    *bell = exponential(-0.5f * z * z);
    V tail = 0.5f * t * q * *bell, far = chosen((Bits)(z < 0.0f), tail, 1.0f - tail);
    return chosen((Bits)(v < 1.0f), 0.5f + z * (0.35355339f * p), far);
}

/* (1 + tanh(√(2/π)(z + 0.044715z³)))/2 is a sigmoid; `slope`: of its argument. */
static inline V tanh_gate(V z, V *slope) {
    V square = not_above(z * z, 1e6f); /* far beyond where the gate is 0 or 1 */
    *slope = 1.5957691216f + 0.2140644488f * square;
    return sigmoid(z * (1.5957691216f + 0.0713548163f * square));
}

static inline V silu(V z) { return z * sigmoid(z); }
static inline V relu(V z) { return not_below(z, 0.0f); }
static inline V gelu(V z) { V bell; return z * phi(z, &bell); }
static inline V gelu_tanh(V z) { V slope; return z * tanh_gate(z, &slope); }

static inline V silu_slope(V z) {
    V gate = sigmoid(z);
    return gate * (1.0f + z * (1.0f - gate));
}

static inline V relu_slope(V z) { return chosen((Bits)(z <= 0.0f), (V){0}, (V){0} + 1.0f); }

static inline V gelu_slope(V z) {
    V bell, gate = phi(z, &bell);
    return gate + z * 0.39894228f * bell;
}

static inline V gelu_tanh_slope(V z) {
    V slope, gate = tanh_gate(z, &slope);
    return gate + z * gate * (1.0f - gate) * slope;
}

/* The last vector of an array may be a part of one. */
static inline V part_at(const float *from, int64_t n) {
    V x = {0};
    memcpy(&x, from, (size_t)smaller(n, VL) * 4);
    return x;
}

/* to[i] = ACT(z) for all i < n, a switch over activations outside of the loop. */
#define ACTIVATED(T, ACT)                                                                                   \
    do {                                                                                                    \
        int64_t i = 0;                                                                                      \
        for (; i + VL <= n; i += VL) put_##T(to + i, ACT(get_f32(z + i)));                                  \
        if (i < n) {                                                                                        \
            T last[VL];                                                                                     \
            put_##T(last, ACT(part_at(z + i, n - i)));                                                      \
            memcpy(to + i, last, (size_t)(n - i) * sizeof(T));                                              \
        }                                                                                                   \
    } while (0)

#define ACTIVATE(T)                                                                                         \
    LOOP void activate_##T(T *to, const float *z, int64_t n, int64_t activation) { /* they may be the same */ \
        if (activation == SILU) ACTIVATED(T, silu);                                                         \
        else if (activation == RELU) ACTIVATED(T, relu);                                                    \
        else if (activation == GELU) ACTIVATED(T, gelu);                                                    \
        else ACTIVATED(T, gelu_tanh);                                                                       \
    }
ACTIVATE(f32)
ACTIVATE(bf16)
ACTIVATE(f16)

static void activate(void *to, int64_t at, const float *z, int64_t n, int64_t activation, int64_t type) {
    if (type == F32) activate_f32((float *)to + at, z, n, activation);
    else if (type == BF16) activate_bf16((uint16_t *)to + at, z, n, activation);
    else activate_f16((uint16_t *)to + at, z, n, activation);
}

/* dz = dy·act'(z), (32), with z = x_hat·gain + term and x_hat = (x - mean)·rstd; Z says which of these vary. */
#define WHOLE(array) get_f32((array) + i)
#define PART(array) part_at((array) + i, n - i)
#define THROUGH(Z, SLOPE)                                                                                   \
    do {                                                                                                    \
        int64_t i = 0;                                                                                      \
        for (; i + VL <= n; i += VL) put_f32(dz + i, get_f32(dy + i) * SLOPE(Z(WHOLE)));                    \
        if (i < n) {                                                                                        \
            V last = PART(dy) * SLOPE(Z(PART));                                                             \
            memcpy(dz + i, &last, (size_t)(n - i) * 4);                                                     \
        }                                                                                                   \
    } while (0)
#define THROUGH_ANY(Z)                                          \
    if (activation == SILU) THROUGH(Z, silu_slope);             \
    else if (activation == RELU) THROUGH(Z, relu_slope);        \
    else if (activation == GELU) THROUGH(Z, gelu_slope);        \
    else THROUGH(Z, gelu_tanh_slope);

#define Z_OF_ROW(AT) ((AT(x) - mean) * rstd * AT(gain) + AT(term))
#define Z_ALIKE(AT) ((AT(x) - mean) * rstd * gain + term)
#define Z_OF_COLUMNS(AT) ((AT(x) - AT(mean)) * AT(rstd) * AT(gain) + AT(term))

LOOP void through(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd, const float *restrict gain,
                  const float *restrict term, int64_t n, int64_t activation) {
    THROUGH_ANY(Z_OF_ROW)
}

LOOP void through_alike(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd, float gain, float term, int64_t n,
                        int64_t activation) {
    THROUGH_ANY(Z_ALIKE)
}

LOOP void through_columns(float *restrict dz, const float *restrict dy, const float *restrict x, const float *restrict mean, const float *restrict rstd,
                          const float *restrict gain, const float *restrict term, int64_t n, int64_t activation) {
    THROUGH_ANY(Z_OF_COLUMNS)
}

/* x_hat from y, (36). */
LOOP void x_hat_from(float *restrict x_hat, const float *restrict y, const float *restrict gain, const float *restrict term, int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain[i] == 0.0f ? NAN : (y[i] - term[i]) / gain[i];
}

LOOP void x_hat_from_alike(float *restrict x_hat, const float *restrict y, float gain, float term, int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain == 0.0f ? NAN : (y[i] - term) / gain;
}
