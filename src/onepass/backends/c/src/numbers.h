/* Numbers: half types to and from floats, and the activations. Plain loops, which a compiler turns into vector instructions. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define LOOP static __attribute__((noinline)) /* called, not inlined, so that the compiler believes `restrict` and vectorizes */

#define STRIP _Alignas(64) float /* an array of floats that vectors are read from */

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

/* Vectors as gcc and clang know them on every machine, of the width of its registers; elements of each type are read and written as floats. */
#if defined(__AVX512F__)
enum { VL = 16 };
#elif defined(__AVX__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif
typedef float V __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * VL)));
typedef uint16_t Halves __attribute__((vector_size(2 * VL), aligned(2), may_alias));
typedef float f32;
typedef uint16_t bf16, f16;

static inline float get1_f32(const f32 *from) { return *from; }
static inline float get1_bf16(const bf16 *from) { return from_bf16(*from); }
static inline float get1_f16(const f16 *from) { return from_f16(*from); }
static inline void put1_f32(f32 *to, float x) { *to = x; }
static inline void put1_bf16(bf16 *to, float x) { *to = to_bf16(x); }
static inline void put1_f16(f16 *to, float x) { *to = to_f16(x); }

static inline V get_f32(const f32 *from) { return *(const V *)from; }
static inline void put_f32(f32 *to, V x) { *(V *)to = x; }
/* The lower halves of 32 bits, of which the upper are zero. Intrinsics where compilers make too much of it. */
#if defined(__AVX512F__)
static inline Bits widened(const uint16_t *from) { return (Bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)); }
static inline void narrowed(uint16_t *to, Bits bits) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)bits)); }
#elif defined(__AVX2__)
static inline Bits widened(const uint16_t *from) { return (Bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)); }
static inline void narrowed(uint16_t *to, Bits bits) {
    __m256i all = (__m256i)bits;
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
#else
static inline Bits widened(const uint16_t *from) { return __builtin_convertvector(*(const Halves *)from, Bits); }
static inline void narrowed(uint16_t *to, Bits bits) { *(Halves *)to = __builtin_convertvector(bits, Halves); }
#endif

static inline V get_bf16(const bf16 *from) { return (V)(widened(from) << 16); }
static inline void put_bf16(bf16 *to, V x) {
    Bits bits = (Bits)x, rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, nan = (Bits)(x != x);
    narrowed(to, (rounded & ~nan) | (nan & 0x7fc0u));
}

#if defined(__AVX512F__)
static inline V get_f16(const f16 *from) { return (V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
static inline void put_f16(f16 *to, V x) { _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__F16C__) && defined(__AVX__)
static inline V get_f16(const f16 *from) { return (V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
static inline void put_f16(f16 *to, V x) { _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT)); }
#elif defined(__aarch64__)
static inline V get_f16(const f16 *from) { return (V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
static inline void put_f16(f16 *to, V x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x))); }
#else
static inline V get_f16(const f16 *from) {
    V x;
    for (int l = 0; l < VL; l++) x[l] = from_f16(from[l]);
    return x;
}
static inline void put_f16(f16 *to, V x) {
    for (int l = 0; l < VL; l++) to[l] = to_f16(x[l]);
}
#endif

#define CONVERSIONS(T)                                                                  \
    LOOP void load_##T(float *restrict to, const T *restrict from, int64_t n) {         \
        int64_t i = 0;                                                                  \
        for (; i + VL <= n; i += VL) put_f32(to + i, get_##T(from + i));                \
        for (; i < n; i++) to[i] = get1_##T(from + i);                                  \
    }                                                                                   \
    LOOP void store_##T(T *restrict to, const float *restrict from, int64_t n) {        \
        int64_t i = 0;                                                                  \
        for (; i + VL <= n; i += VL) put_##T(to + i, get_f32(from + i));                \
        for (; i < n; i++) put1_##T(to + i, from[i]);                                   \
    }
CONVERSIONS(bf16)
CONVERSIONS(f16)

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

/* Where element `at` lies. */
static inline const void *there(const void *memory, int64_t at, int64_t type) { return (const char *)memory + at * size_of(type); }
static inline void *place(void *memory, int64_t at, int64_t type) { return (char *)memory + at * size_of(type); }

/* Ask for memory that will be needed soon, so that it comes while something else is computed. */
static inline void ahead(const void *memory, int64_t at, int64_t n, int64_t type, int writes) {
    const char *from = there(memory, at, type);
    for (int64_t k = 0; k < n * size_of(type); k += 64) {
        if (writes) __builtin_prefetch(from + k, 1, 2);
        else __builtin_prefetch(from + k, 0, 2);
    }
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
