/* Numbers: half types to and from floats, and the activations. Plain loops, which a compiler turns into vector instructions. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LOOP static __attribute__((noinline)) /* called, not inlined, so that the compiler believes `restrict` and vectorizes */

enum { NONE, F32, BF16, F16 };                    /* types; NONE: there is no such tensor */
enum { IDENTITY, SILU, RELU, GELU, GELU_TANH };   /* activations */

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t pieces_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* a / b and a % b. Divisions of 64 bits take as long as a hundred other instructions; most divisors here are 1, and nearly all numbers small. */
static inline int64_t over(int64_t a, int64_t b) { return b == 1 ? a : (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b); }
static inline int64_t rest(int64_t a, int64_t b) { return b == 1 ? 0 : (uint64_t)(a | b) >> 32 ? a % b : (int64_t)((uint32_t)a % (uint32_t)b); }

static inline uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float of_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline int64_t size_of(int64_t type) { return type == F32 ? 4 : 2; }

static inline float from_bf16(uint16_t half) { return of_bits((uint32_t)half << 16); }

static inline uint16_t to_bf16(float x) { /* to the nearest, ties to even */
    uint32_t bits = bits_of(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

/* fp16 by integers, where the machine has no instruction for it. Normal halves differ from floats in exponent bias and width only; the
   subnormal ones are multiples of 2^-24, which a float adds up exactly. */
static inline float from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    uint32_t normal = (rest << 13) + ((127u - 15u) << 23), special = (rest << 13) | 0x7f800000u;
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    return of_bits(sign | (rest >= 0x7c00u ? special : rest < 0x0400u ? subnormal : normal));
}

static inline uint16_t to_f16(float x) { /* to the nearest, ties to even */
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t normal = (rest - ((127u - 15u) << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
    uint32_t subnormal = bits_of(of_bits(rest) + 0.5f) - bits_of(0.5f); /* ulps of 0.5f are 2^-24 */
    uint32_t half = rest < (113u << 23) ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
    return (uint16_t)(sign | (rest > 0x7f800000u ? 0x7e00u : half));
}

LOOP void load_bf16(float *restrict to, const uint16_t *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = from_bf16(from[i]);
}

LOOP void store_bf16(uint16_t *restrict to, const float *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = to_bf16(from[i]);
}

LOOP void load_f16(float *restrict to, const uint16_t *restrict from, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#elif defined(__aarch64__)
    for (; i + 4 <= n; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
#endif
    for (; i < n; i++) to[i] = from_f16(from[i]);
}

LOOP void store_f16(uint16_t *restrict to, const float *restrict from, int64_t n) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__aarch64__)
    for (; i + 4 <= n; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
#endif
    for (; i < n; i++) to[i] = to_f16(from[i]);
}

static void load(float *restrict to, const void *from, int64_t at, int64_t n, int64_t type) {
    if (type == BF16) load_bf16(to, (const uint16_t *)from + at, n);
    else if (type == F16) load_f16(to, (const uint16_t *)from + at, n);
    else memcpy(to, (const float *)from + at, (size_t)n * 4);
}

static void store(void *to, int64_t at, const float *restrict from, int64_t n, int64_t type) {
    if (type == BF16) store_bf16((uint16_t *)to + at, from, n);
    else if (type == F16) store_f16((uint16_t *)to + at, from, n);
    else memcpy((float *)to + at, from, (size_t)n * 4);
}

LOOP void fill(float *restrict to, float value, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = value;
}

LOOP void multiply(float *restrict x, const float *restrict by, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= by[i];
}

LOOP void add(float *restrict x, const float *restrict other, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += other[i];
}

/* n numbers as floats: where they lie, or, of a half type, in `strip`. */
static inline const float *floats(const void *from, int64_t at, int64_t n, int64_t type, float *strip) {
    if (type == F32) return (const float *)from + at;
    load(strip, from, at, n, type);
    return strip;
}

/* exp to 1 ulp; 0 below -87.3, infinite above 88.7. Adding 1.5·2^23 rounds x/ln 2 to an integer k, exp x = 2^k·exp(x - k·ln 2): no fast-math. */
static inline float exponential(float x) {
    x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
    float shifted = x * 1.44269504f + 12582912.0f, k = shifted - 12582912.0f;
    float r = x - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * of_bits((bits_of(shifted) + 127u) << 23);
}

static inline float sigmoid(float z) { return 1.0f / (1.0f + exponential(-z)); }

/* The normal distribution's Φ(z) and, by the way, exp(-z²/2). With v = |z|/√2, Φ(-|z|) = erfc(v)/2 and erfc(v)·exp(v²) = t·q(t), t = 1/(1 + 0.4v):
   q fitted to a relative error of 9e-8. */
static inline float phi(float z, float *bell) {
    float v = fabsf(z) * 0.70710678f, t = 1.0f / (1.0f + 0.4f * v), q = 0.04596281424164772f;
    q = q * t - 0.16303355991840363f;
    q = q * t + 0.13044635951519012f;
    q = q * t + 0.035491082817316055f;
    q = q * t + 0.11543142050504684f;
    q = q * t + 0.17849509418010712f;
    q = q * t + 0.20560678839683533f;
    q = q * t + 0.22593723237514496f;
    q = q * t + 0.22566287219524384f;
    *bell = exponential(-0.5f * z * z);
    float tail = 0.5f * t * q * *bell;
    return z < 0.0f ? tail : 1.0f - tail;
}

/* (1 + tanh(√(2/π)(z + 0.044715z³)))/2 is a sigmoid; `slope`: of its argument. */
static inline float tanh_gate(float z, float *slope) {
    float square = z * z;
    *slope = 1.5957691216f + 0.2140644488f * square;
    return sigmoid(z * (1.5957691216f + 0.0713548163f * square));
}

LOOP void activate(float *restrict z, int64_t n, int64_t activation) {
    float other;
    if (activation == SILU) for (int64_t i = 0; i < n; i++) z[i] = z[i] * sigmoid(z[i]);
    else if (activation == RELU) for (int64_t i = 0; i < n; i++) z[i] = z[i] < 0.0f ? 0.0f : z[i];
    else if (activation == GELU) for (int64_t i = 0; i < n; i++) z[i] = z[i] * phi(z[i], &other);
    else if (activation == GELU_TANH) for (int64_t i = 0; i < n; i++) z[i] = z[i] * tanh_gate(z[i], &other);
}

static inline float silu_slope(float z) {
    float gate = sigmoid(z);
    return gate * (1.0f + z * (1.0f - gate));
}

static inline float gelu_slope(float z) {
    float bell, gate = phi(z, &bell);
    return gate + z * 0.39894228f * bell;
}

static inline float gelu_tanh_slope(float z) {
    float slope, gate = tanh_gate(z, &slope);
    return gate + z * gate * (1.0f - gate) * slope;
}

/* dz = dy·act'(z), (32), with z = x_hat·gain + term and x_hat = (x - mean)·rstd; mean and rstd are arrays where they vary. */
#define SLOPES(z_)                                                                                            \
    if (activation == SILU) for (int64_t i = 0; i < n; i++) { float z = z_; dz[i] = dy[i] * silu_slope(z); }  \
    else if (activation == RELU) for (int64_t i = 0; i < n; i++) { float z = z_; dz[i] = z > 0.0f || z != z ? dy[i] : 0.0f; } \
    else if (activation == GELU) for (int64_t i = 0; i < n; i++) { float z = z_; dz[i] = dy[i] * gelu_slope(z); } \
    else for (int64_t i = 0; i < n; i++) { float z = z_; dz[i] = dy[i] * gelu_tanh_slope(z); }

LOOP void through(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd, const float *restrict gain,
                  const float *restrict term, int64_t n, int64_t activation) {
    SLOPES((x[i] - mean) * rstd * gain[i] + term[i])
}

LOOP void through_alike(float *restrict dz, const float *restrict dy, const float *restrict x, float mean, float rstd, float gain, float term, int64_t n,
                        int64_t activation) {
    SLOPES((x[i] - mean) * rstd * gain + term)
}

LOOP void through_columns(float *restrict dz, const float *restrict dy, const float *restrict x, const float *restrict mean, const float *restrict rstd,
                          const float *restrict gain, const float *restrict term, int64_t n, int64_t activation) {
    SLOPES((x[i] - mean[i]) * rstd[i] * gain[i] + term[i])
}

/* x_hat from y, (36). */
LOOP void x_hat_from(float *restrict x_hat, const float *restrict y, const float *restrict gain, const float *restrict term, int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain[i] == 0.0f ? NAN : (y[i] - term[i]) / gain[i];
}

LOOP void x_hat_from_alike(float *restrict x_hat, const float *restrict y, float gain, float term, int64_t n) {
    for (int64_t i = 0; i < n; i++) x_hat[i] = gain == 0.0f ? NAN : (y[i] - term) / gain;
}
