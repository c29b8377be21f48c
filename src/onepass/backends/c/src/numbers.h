/* Element types and vectors: float32, bfloat16 and float16 elements are read as floats and written from floats.

   Integer helpers, address helpers and simple loops over float arrays also belong here.
   Nothing in this file knows about sets, parameters or gradients. */
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

/* A loop that the compiler vectorizes. It is never inlined, since the compiler would then ignore `restrict`. */
#define VECTOR_LOOP static __attribute__((noinline))

/* The element of a float array that vectors are read from. */
#define ALIGNED_FLOAT _Alignas(64) float

enum { ABSENT, F32, BF16, F16 };                /* element types; ABSENT: the call has no such tensor */

/* The activations, in the order of core/spec.py. X gets the constant, the function (its derivative is FUNCTION_derivative) and ARGUMENT. */
#define ACTIVATIONS(X, ARGUMENT) X(SILU, silu, ARGUMENT) X(RELU, relu, ARGUMENT) X(GELU, gelu, ARGUMENT) X(GELU_TANH, gelu_tanh, ARGUMENT)
#define ACTIVATION_CONSTANT(NAME, FUNCTION, ARGUMENT) , NAME
enum { IDENTITY ACTIVATIONS(ACTIVATION_CONSTANT, ) };

static inline int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* a / b and a % b for numbers that are not negative. A 64-bit division takes as long as a hundred other instructions.
   Most divisors here are 1, and nearly all numbers fit 32 bits. */
static inline int64_t fast_div(int64_t a, int64_t b) {
    return b == 1 ? a : (uint64_t)(a | b) >> 32 ? a / b : (int64_t)((uint32_t)a / (uint32_t)b);
}
static inline int64_t fast_mod(int64_t a, int64_t b) {
    return b == 1 ? 0 : (uint64_t)(a | b) >> 32 ? a % b : (int64_t)((uint32_t)a % (uint32_t)b);
}

static inline uint32_t float_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline float float_from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline int64_t element_size(int64_t type) { return type == F32 ? 4 : 2; }

static inline float bf16_to_float(uint16_t half) { return float_from_bits((uint32_t)half << 16); }

static inline uint16_t float_to_bf16(float x) { /* rounds to nearest, ties to even */
    uint32_t bits = float_bits(x), rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

/* float16 conversions in integer arithmetic, for machines without an instruction for them.
   Normal float16 numbers differ from floats only in the exponent's bias and in the widths of the fields.
   Subnormal ones are multiples of 2^-24, which a float holds exactly. */
static inline float f16_to_float(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = half & 0x7fffu;
    uint32_t normal = (rest << 13) + ((127u - 15u) << 23), special = (rest << 13) | 0x7f800000u;
    uint32_t subnormal = float_bits((float)(int32_t)rest * 0x1p-24f);
    return float_from_bits(sign | (rest >= 0x7c00u ? special : rest < 0x0400u ? subnormal : normal));
}

static inline uint16_t float_to_f16(float x) { /* rounds to nearest, ties to even */
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    uint32_t normal = (rest - ((127u - 15u) << 23) + 0x0fffu + (rest >> 13 & 1u)) >> 13;
    uint32_t subnormal = float_bits(float_from_bits(rest) + 0.5f) - float_bits(0.5f); /* one ulp of 0.5f is 2^-24 */
    uint32_t half = rest < (113u << 23) ? subnormal : rest >= 0x477ff000u ? 0x7c00u : normal;
    return (uint16_t)(sign | (rest > 0x7f800000u ? 0x7e00u : half));
}

/* Vectors as wide as the machine's registers, in the vector extension that gcc and clang share.
   read_* and write_* convert between elements of a type and floats. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float FloatVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t BitsVector __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVector __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef float f32;
typedef uint16_t bf16, f16;

static inline float read_one_f32(const f32 *from) { return *from; }
static inline float read_one_bf16(const bf16 *from) { return bf16_to_float(*from); }
static inline float read_one_f16(const f16 *from) { return f16_to_float(*from); }
static inline void write_one_f32(f32 *to, float x) { *to = x; }
static inline void write_one_bf16(bf16 *to, float x) { *to = float_to_bf16(x); }
static inline void write_one_f16(f16 *to, float x) { *to = float_to_f16(x); }

static inline FloatVector read_vector_f32(const f32 *from) { return *(const FloatVector *)from; }
static inline void write_vector_f32(f32 *to, FloatVector x) { *(FloatVector *)to = x; }

/* 16-bit elements to and from 32-bit lanes whose upper halves are 0.
   Compilers generate slow code for this, so there are intrinsics where the machine has them. */
#if defined(__AVX512F__)
static inline BitsVector widen_halves(const uint16_t *from) {
    return (BitsVector)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}
static inline void narrow_to_halves(uint16_t *to, BitsVector bits) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)bits));
}
#elif defined(__AVX2__)
static inline BitsVector widen_halves(const uint16_t *from) {
    return (BitsVector)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}
static inline void narrow_to_halves(uint16_t *to, BitsVector bits) {
    __m256i all = (__m256i)bits;
    _mm_storeu_si128((__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
#else
static inline BitsVector widen_halves(const uint16_t *from) { return __builtin_convertvector(*(const HalfVector *)from, BitsVector); }
static inline void narrow_to_halves(uint16_t *to, BitsVector bits) { *(HalfVector *)to = __builtin_convertvector(bits, HalfVector); }
#endif

/* What is added to a float before its lower half is cut, so that it is rounded to nearest, ties to even. */
static inline BitsVector bf16_rounding(BitsVector bits) { return (bits >> 16 & 1u) + 0x7fffu; }

#if defined(__aarch64__)
static inline FloatVector read_vector_bf16(const bf16 *from) { return (FloatVector)vshll_n_u16(vld1_u16(from), 16); }
static inline void write_vector_bf16(bf16 *to, FloatVector x) { /* vaddhn adds and keeps the upper halves */
    BitsVector number = (BitsVector)(x == x), bits = ((BitsVector)x & number) | (~number & 0x7fc00000u);
    vst1_u16(to, vaddhn_u32((uint32x4_t)bits, (uint32x4_t)bf16_rounding(bits)));
}
#else
static inline FloatVector read_vector_bf16(const bf16 *from) { return (FloatVector)(widen_halves(from) << 16); }
static inline void write_vector_bf16(bf16 *to, FloatVector x) {
    BitsVector bits = (BitsVector)x, rounded = (bits + bf16_rounding(bits)) >> 16, nan = (BitsVector)(x != x);
    narrow_to_halves(to, (rounded & ~nan) | (nan & 0x7fc0u));
}
#endif

#if defined(__AVX512F__)
static inline FloatVector read_vector_f16(const f16 *from) {
    return (FloatVector)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}
static inline void write_vector_f16(f16 *to, FloatVector x) {
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && defined(__AVX__)
static inline FloatVector read_vector_f16(const f16 *from) { return (FloatVector)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from)); }
static inline void write_vector_f16(f16 *to, FloatVector x) {
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__aarch64__)
static inline FloatVector read_vector_f16(const f16 *from) { return (FloatVector)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
static inline void write_vector_f16(f16 *to, FloatVector x) { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x))); }
#else
static inline FloatVector read_vector_f16(const f16 *from) {
    FloatVector x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = f16_to_float(from[lane]);
    return x;
}
static inline void write_vector_f16(f16 *to, FloatVector x) {
    for (int lane = 0; lane < LANES; lane++) to[lane] = float_to_f16(x[lane]);
}
#endif

#define DEFINE_CONVERSIONS(T)                                                                   \
    VECTOR_LOOP void floats_from_##T(float *restrict to, const T *restrict from, int64_t n) {   \
        int64_t i = 0;                                                                          \
        for (; i + LANES <= n; i += LANES) write_vector_f32(to + i, read_vector_##T(from + i)); \
        for (; i < n; i++) to[i] = read_one_##T(from + i);                                      \
    }                                                                                           \
    VECTOR_LOOP void T##_from_floats(T *restrict to, const float *restrict from, int64_t n) {   \
        int64_t i = 0;                                                                          \
        for (; i + LANES <= n; i += LANES) write_vector_##T(to + i, read_vector_f32(from + i)); \
        for (; i < n; i++) write_one_##T(to + i, from[i]);                                      \
    }
DEFINE_CONVERSIONS(bf16)
DEFINE_CONVERSIONS(f16)

/* Read n elements of a type, from `index` on, as floats. */
static void load_floats(float *restrict to, const void *from, int64_t index, int64_t n, int64_t type) {
    if (type == BF16) floats_from_bf16(to, (const uint16_t *)from + index, n);
    else if (type == F16) floats_from_f16(to, (const uint16_t *)from + index, n);
    else memcpy(to, (const float *)from + index, (size_t)n * 4);
}

/* Write n floats as elements of a type, from `index` on. */
static void store_floats(void *to, int64_t index, const float *restrict from, int64_t n, int64_t type) {
    if (type == BF16) bf16_from_floats((uint16_t *)to + index, from, n);
    else if (type == F16) f16_from_floats((uint16_t *)to + index, from, n);
    else memcpy((float *)to + index, from, (size_t)n * 4);
}

/* The address of element `index`. */
static inline const void *element_at(const void *memory, int64_t index, int64_t type) {
    return (const char *)memory + index * element_size(type);
}
static inline void *mutable_element_at(void *memory, int64_t index, int64_t type) { return (char *)memory + index * element_size(type); }

/* Start loading n elements into the cache, so that they arrive while other work goes on.
   On ARM it does nothing: its cores find such streams themselves, and many prefetches at once delay them.
   Without prefetches, y took 0.34 ns an element instead of 0.57 (Neoverse N1, November 2026). */
static inline void prefetch(const void *memory, int64_t index, int64_t n, int64_t type, int writes) {
#if defined(__aarch64__)
    return;
#endif
    const char *from = element_at(memory, index, type);
    for (int64_t k = 0; k < n * element_size(type); k += 64) {
        if (writes) __builtin_prefetch(from + k, 1, 2);
        else __builtin_prefetch(from + k, 0, 2);
    }
}

/* Prefetch one cache line among other work, on ARM only. Its cores follow only a few streams by themselves, so this helps
   loops over several. Column moments took 0.28 ns an element instead of 0.38 (Neoverse N1, November 2026). */
enum { LINES_AHEAD = 128 }; /* 8 KB */
static inline void prefetch_line(const void *address) {
#if defined(__aarch64__)
    __builtin_prefetch(address, 0, 3);
#else
    (void)address;
#endif
}

VECTOR_LOOP void fill(float *restrict to, float value, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = value;
}

VECTOR_LOOP void multiply_by(float *restrict x, const float *restrict by, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= by[i];
}

VECTOR_LOOP void add_to(float *restrict x, const float *restrict other, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] += other[i];
}

/* n elements as floats. float32 elements stay where they are; others are converted into `buffer`. */
static inline const float *floats_at(const void *from, int64_t index, int64_t n, int64_t type, float *buffer) {
    if (type == F32) return (const float *)from + index;
    load_floats(buffer, from, index, n, type);
    return buffer;
}
