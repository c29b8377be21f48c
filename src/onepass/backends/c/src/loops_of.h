/* The loops of loops.h for each type of element. */
#pragma once
#include "problem.h"

typedef struct { double one, two; } Pair;

/* Whether an m2 can be used. Sums of floats have overflowed where it is no number. Of a two-pass sum of squares, most of what a rounded mean leaves
   cancels: where that is nearly all of it, the values are constant but for a few digits, and m2 is nothing but rounding. */
static inline int is_sound(double m2, double squares, int two_passes) { return m2 < (double)INFINITY && m2 >= (two_passes ? 0x1p-10 : -1.0) * squares; }

static inline int is_number(double x) { return x - x == 0.0; } /* neither infinite nor NaN */

static inline float across(V v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1)), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    return (v[0] + v[2]) + (v[1] + v[3]);
#endif
}

#define T f32
#include "loops.h"
#undef T
#define T bf16
#include "loops.h"
#undef T
#define T f16
#include "loops.h"
#undef T

typedef const float *restrict Floats;
typedef const void *Row; /* of the type */

typedef struct {
    void (*moments)(double *restrict means, double *restrict m2, Row x, int64_t step, int64_t rows, int64_t n, int centered, const float *known);
    void (*normalize)(void *y, Row x, int64_t step, Floats mean, Floats rstd, Floats gain, Floats term, int64_t rows, int64_t n);
    void (*normalize_alike)(void *y, Row x, float mean, float factor, float term, int64_t n);
    Pair (*sums_alike)(Row x, float mean, Row dz, int64_t n);
    void (*sums)(float *restrict c1, float *restrict c2, Row x, int64_t step, Floats mean, Floats rstd, Row dz, Floats gain, int64_t rows, int64_t n);
    void (*products)(float *restrict a, float *restrict b, Row x, int64_t step, Floats mean, Floats rstd, Row dz, int64_t rows, int64_t n);
    void (*dx)(void *dx, Row x, int64_t step, Floats mean, Floats rstd, Floats scale, Row dz, Floats gain, Floats c1, Floats c2, int64_t rows, int64_t n);
    void (*dx_alike)(void *dx, Row x, float mean, Row dz, float gain, float c1, float c2, float rstd, int64_t n);
    void (*add_rows)(float *restrict sum, const Row *rows, int64_t count, int64_t n);
    void (*add_rows_about)(float *restrict left, float *restrict squares, Floats about, const Row *rows, int64_t count, int64_t n);
    void (*columns_wide)(double *restrict mean, double *restrict m2, const Row *rows, int64_t count, int64_t n, int centered);
    void (*normalize_columns)(void *y, Row x, Floats mean, Floats factor, Floats term, int64_t n);
    void (*normalize_columns_alike)(void *y, Row x, Floats mean, Floats rstd, float gain, float term, int64_t n);
    void (*add_columns)(float *restrict a, float *restrict b, Row x, Row dz, Floats mean, Floats rstd, int64_t n);
    void (*add_columns_weighted)(float *restrict a, float *restrict b, Row x, Row dz, Floats mean, Floats rstd, Floats gain, int64_t n);
    void (*add_columns_alike)(float *restrict a, float *restrict b, Row x, Row dz, Floats mean, Floats rstd, float gain, int64_t n);
    Pair (*sums_row)(Row x, Row dz, Floats mean, Floats rstd, int64_t n);
    void (*products_row)(float *restrict a, float *restrict b, Row x, Row dz, Floats mean, Floats rstd, int64_t n);
    void (*dx_columns)(void *dx, Row x, Row dz, Floats mean, Floats of_dz, Floats of_x, Floats constant, int64_t n);
    void (*dx_columns_alike)(void *dx, Row x, Row dz, Floats mean, Floats rstd, float gain, Floats of_x, Floats constant, int64_t n);
} Loops;

static const Loops loops_of[] = {[F32] = LOOPS_OF(f32), [BF16] = LOOPS_OF(bf16), [F16] = LOOPS_OF(f16)};
