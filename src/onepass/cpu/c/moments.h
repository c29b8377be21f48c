/* Moments: of a strip along its elements, and of the columns of several rows; two passes each, in the first-level cache, and merges in double. */
#pragma once
#include "numbers.h"

enum { LANES = 32 };            /* sums that run side by side */
enum { ROWS = 16, SPAN = 512 }; /* rows, and columns of them, whose moments are taken together: they fit the first-level cache */

typedef struct { double count, mean, m2; } Moments; /* without centering, mean is 0 and m2 the sum of squares */
typedef struct { double one, two; } Pair;

static inline double across(float *lanes) {
    for (int half = LANES / 2; half; half /= 2) for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The sums over i < n of two terms. */
#define SUMS(one_, two_)                                                                                          \
    float lanes1[LANES] = {0}, lanes2[LANES] = {0};                                                               \
    int64_t start = 0;                                                                                            \
    for (; start + LANES <= n; start += LANES)                                                                    \
        for (int l = 0; l < LANES; l++) { int64_t i = start + l; lanes1[l] += (one_); lanes2[l] += (two_); }      \
    for (int l = 0; start + l < n; l++) { int64_t i = start + l; lanes1[l] += (one_); lanes2[l] += (two_); }      \
    return (Pair){across(lanes1), across(lanes2)};

LOOP double sum_of(const float *restrict x, int64_t n) {
    float lanes[LANES] = {0};
    int64_t start = 0;
    for (; start + LANES <= n; start += LANES) for (int l = 0; l < LANES; l++) lanes[l] += x[start + l];
    for (int l = 0; start + l < n; l++) lanes[l] += x[start + l];
    return across(lanes);
}

LOOP Pair sums_about(const float *restrict x, float mean, int64_t n) { SUMS(x[i] - mean, (x[i] - mean) * (x[i] - mean)) }

/* (2), (3). What the rounded mean left of the sum corrects both. */
static Moments moments_of(const float *x, int64_t n, int centered) {
    double count = (double)n;
    float mean = centered ? (float)(sum_of(x, n) / count) : 0.0f;
    Pair left = sums_about(x, mean, n);
    if (!centered) return (Moments){count, 0.0, left.two};
    return (Moments){count, mean + left.one / count, left.two - left.one * left.one / count};
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
