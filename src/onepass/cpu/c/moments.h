/* Moments: of a strip along its elements, and of the columns of several rows; two passes each, in the first-level cache, and merges in double. */
#pragma once
#include "problem.h"

enum { ROWS = 16, SPAN = 512 }; /* rows, and columns of them, whose moments are taken together: they fit the first-level cache */

typedef struct { double count, mean, m2; } Moments; /* without centering, mean is 0 and m2 the sum of squares */
typedef struct { float one, two; } Pair;

/* Sums along memory. A compiler may not change the order of additions, so it is written out: four vectors of sums side by side, one for what they
   leave, and single elements. Vectors are as gcc and clang know them on every machine. */
#if defined(__AVX__)
enum { VL = 8 };
#else
enum { VL = 4 };
#endif
typedef float V __attribute__((vector_size(4 * VL), aligned(4), may_alias));

static inline float across(V v) {
    float lanes[VL];
    memcpy(lanes, &v, sizeof lanes);
    for (int half = VL / 2; half; half /= 2) for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The sums over i < n of two terms, each a macro of how an array is read at i: as a vector or as one element. */
#define VECTOR(array) (*(const V *)((array) + i))
#define SINGLE(array) ((array)[i])
#define SUMS(FIRST, SECOND)                                                                             \
    Pair sums = {0.0f, 0.0f};                                                                           \
    for (int64_t i = 0; i < n;) {                                                                       \
        V f[4] = {{0}}, s[4] = {{0}};                                                                   \
        int64_t end = smaller(n, i + BLOCK); /* so that no sum in float is long */                      \
        while (i + 4 * VL <= end) for (int u = 0; u < 4; u++, i += VL) f[u] += FIRST(VECTOR), s[u] += SECOND(VECTOR); \
        for (; i + VL <= end; i += VL) f[0] += FIRST(VECTOR), s[0] += SECOND(VECTOR);                   \
        sums.one += across((f[0] + f[1]) + (f[2] + f[3])), sums.two += across((s[0] + s[1]) + (s[2] + s[3])); \
        for (; i < end; i++) sums.one += FIRST(SINGLE), sums.two += SECOND(SINGLE);                     \
    }                                                                                                   \
    return sums;

static inline float sum_of(const float *restrict x, int64_t n) {
    V sums[4] = {{0}};
    int64_t i = 0;
    while (i + 4 * VL <= n) for (int u = 0; u < 4; u++, i += VL) sums[u] += VECTOR(x);
    for (; i + VL <= n; i += VL) sums[0] += VECTOR(x);
    float sum = across((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += x[i];
    return sum;
}

#define ABOUT(AT) (AT(x) - mean)
#define SQUARE_ABOUT(AT) ((AT(x) - mean) * (AT(x) - mean))

static inline Pair sums_about(const float *restrict x, float mean, int64_t n) { SUMS(ABOUT, SQUARE_ABOUT) }

/* (2), (3). What the rounded mean left of the sum corrects both. */
LOOP Moments moments_of(const float *restrict x, int64_t n, int centered) {
    double count = (double)n;
    float mean = centered ? sum_of(x, n) / (float)n : 0.0f;
    Pair about = sums_about(x, mean, n);
    if (!centered) return (Moments){count, 0.0, about.two};
    return (Moments){count, mean + about.one / count, about.two - about.one * (about.one / count)};
}

static inline Moments merged(Moments p, Moments q, int centered) { /* (14), (15) */
    if (p.count == 0.0) return q;
    double count = p.count + q.count, delta = q.mean - p.mean, share = q.count / count;
    if (!centered) return (Moments){count, 0.0, p.m2 + q.m2};
    return (Moments){count, p.mean + delta * share, p.m2 + q.m2 + delta * delta * p.count * share};
}

/* Sums over four rows at a time, column by column: fewer trips to the arrays of sums. */
LOOP void add_four(float *restrict sum, const float *restrict p, const float *restrict q, const float *restrict r, const float *restrict s, int64_t n) {
    for (int64_t j = 0; j < n; j++) sum[j] += (p[j] + q[j]) + (r[j] + s[j]);
}

LOOP void add_four_about(float *restrict rest, float *restrict squares, const float *restrict about, const float *restrict p, const float *restrict q,
                         const float *restrict r, const float *restrict s, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        float d = p[j] - about[j], e = q[j] - about[j], f = r[j] - about[j], g = s[j] - about[j];
        rest[j] += (d + e) + (f + g), squares[j] += (d * d + e * e) + (f * f + g * g);
    }
}

LOOP void add_one_about(float *restrict rest, float *restrict squares, const float *restrict about, const float *restrict p, int64_t n) {
    for (int64_t j = 0; j < n; j++) {
        float d = p[j] - about[j];
        rest[j] += d, squares[j] += d * d;
    }
}

LOOP void merge_into(double *restrict mean, double *restrict m2, const float *restrict about, const float *restrict rest, const float *restrict squares,
                     double before, double rows, int64_t n) {
    double share = rows / (before + rows), weight = share * before, of_rows = 1.0 / rows;
    for (int64_t j = 0; j < n; j++) {
        double shift = rest[j] * of_rows, delta = about[j] + shift - mean[j];
        mean[j] += delta * share;
        m2[j] += squares[j] - rest[j] * shift + delta * delta * weight;
    }
}

/* Merge the moments of n columns of `rows` rows into mean and m2, which are of `before` rows. */
static void merge_columns(double *restrict mean, double *restrict m2, int64_t before, const float *const *x, int64_t rows, int64_t n, int centered) {
    float about[SPAN], rest[SPAN], squares[SPAN];
    int64_t fours = rows / 4 * 4;
    for (int64_t j = 0; j < n; j++) about[j] = rest[j] = squares[j] = 0.0f;
    if (centered) {
        for (int64_t r = 0; r < fours; r += 4) add_four(about, x[r], x[r + 1], x[r + 2], x[r + 3], n);
        for (int64_t r = fours; r < rows; r++) add(about, x[r], n);
        for (int64_t j = 0; j < n; j++) about[j] *= 1.0f / (float)rows;
    }
    for (int64_t r = 0; r < fours; r += 4) add_four_about(rest, squares, about, x[r], x[r + 1], x[r + 2], x[r + 3], n);
    for (int64_t r = fours; r < rows; r++) add_one_about(rest, squares, about, x[r], n);
    if (centered) merge_into(mean, m2, about, rest, squares, (double)before, (double)rows, n);
    else for (int64_t j = 0; j < n; j++) m2[j] += squares[j];
}
