/* The loops of loops.h for each element type, as a table of functions, and what those loops need.

   Write loops_for[type].name(...) to call one. */
#pragma once
#include "problem.h"

typedef struct { double first, second; } SumPair;

/* Whether an m2 is accurate. If it is infinite or NaN, a sum of floats has overflowed.
   After two passes, m2 far below `squares` means that the values agree in nearly all digits.
   Then m2 consists of rounding errors, and the caller computes it again in double. */
static inline int is_reliable(double m2, double squares, int two_passes) {
    return m2 < (double)INFINITY && m2 >= (two_passes ? 0x1p-10 : -1.0) * squares;
}

/* Neither infinite nor NaN. */
static inline int is_number(double x) { return x - x == 0.0; }

static inline float sum_lanes(FloatVector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1)),
        two = _mm_add_ps(four, _mm_movehl_ps(four, four));
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

typedef const float *restrict FloatArray;
typedef const void *TypedRow; /* elements of the table's type */

typedef struct {
    void (*row_moments)(double *restrict means, double *restrict m2, TypedRow x, int64_t row_stride, int64_t rows, int64_t n, int centered,
                        const float *known);
    void (*normalize_rows)(void *y, TypedRow x, int64_t row_stride, FloatArray mean, FloatArray rstd, FloatArray gain, FloatArray term,
                           int64_t rows, int64_t n);
    void (*normalize_uniform)(void *y, TypedRow x, float mean, float factor, float term, int64_t n);
    SumPair (*gradient_sums_uniform)(TypedRow x, float mean, TypedRow dz, int64_t n);
    void (*gradient_sums)(float *restrict c1, float *restrict c2, TypedRow x, int64_t row_stride, FloatArray mean, FloatArray rstd,
                          TypedRow dz, FloatArray gain, int64_t rows, int64_t n);
    void (*add_products)(float *restrict a, float *restrict b, TypedRow x, int64_t row_stride, FloatArray mean, FloatArray rstd,
                         TypedRow dz, int64_t rows, int64_t n);
    void (*dx_rows)(void *dx, TypedRow x, int64_t row_stride, FloatArray mean, FloatArray rstd, FloatArray dx_rstd, TypedRow dz,
                    FloatArray gain, FloatArray c1, FloatArray c2, int64_t rows, int64_t n);
    void (*dx_uniform)(void *dx, TypedRow x, float mean, TypedRow dz, float gain, float c1, float c2, float rstd, int64_t n);
    void (*add_rows)(float *restrict sum, const TypedRow *rows, int64_t count, int64_t n);
    void (*add_row_deviations)(float *restrict left, float *restrict squares, FloatArray center, const TypedRow *rows, int64_t count,
                               int64_t n);
    void (*column_moments_in_double)(double *restrict mean, double *restrict m2, const TypedRow *rows, int64_t count, int64_t n,
                                     int centered);
    void (*normalize_columns)(void *y, TypedRow x, FloatArray mean, FloatArray factor, FloatArray term, int64_t n);
    void (*normalize_two_rows)(void *y0, void *y1, TypedRow x0, TypedRow x1, FloatArray mean, FloatArray factor, FloatArray term, int64_t n);
    void (*normalize_columns_uniform)(void *y, TypedRow x, FloatArray mean, FloatArray rstd, float gain, float term, int64_t n);
    void (*add_column_products)(float *restrict a, float *restrict b, TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd, int64_t n);
    void (*add_column_products_weighted)(float *restrict a, float *restrict b, TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd,
                                         FloatArray gain, int64_t n);
    void (*add_column_products_uniform)(float *restrict a, float *restrict b, TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd,
                                        float gain, int64_t n);
    SumPair (*row_sums)(TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd, int64_t n);
    void (*row_products)(float *restrict a, float *restrict b, TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd, int64_t n);
    void (*dx_columns)(void *dx, TypedRow x, TypedRow dz, FloatArray mean, FloatArray dz_factor, FloatArray x_factor, FloatArray constant,
                       int64_t n);
    void (*dx_columns_uniform)(void *dx, TypedRow x, TypedRow dz, FloatArray mean, FloatArray rstd, float gain, FloatArray x_factor,
                               FloatArray constant, int64_t n);
} LoopTable;

static const LoopTable loops_for[] = {[F32] = LOOP_TABLE(f32), [BF16] = LOOP_TABLE(bf16), [F16] = LOOP_TABLE(f16)};
