/* Moments: of a strip along its elements, and of the columns of several rows; two passes each, in the first-level cache, and merges in double. */
#pragma once
#include "numbers.h"

enum { LANES = 32, ROWS = 16 }; /* sums that run side by side; rows whose columns are summed before they meet the others */

typedef struct { double count, mean, m2; } Moments; /* without centering, mean is 0 and m2 the sum of squares */

static inline double across(float *lanes) {
    for (int half = LANES / 2; half; half /= 2) for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
    return lanes[0];
}

/* The sums over n elements of what `term` says of element i, for two terms. */
#define SUMS(first, second, n, one, two)                                                                            \
    do {                                                                                                            \
        float lanes1[LANES] = {0}, lanes2[LANES] = {0};                                                             \
        int64_t start = 0;                                                                                          \
        for (; start + LANES <= (n); start += LANES)                                                                \
            for (int l = 0; l < LANES; l++) { int64_t i = start + l; lanes1[l] += (one); lanes2[l] += (two); }      \
        for (int l = 0; start + l < (n); l++) { int64_t i = start + l; lanes1[l] += (one); lanes2[l] += (two); }    \
        (first) = across(lanes1), (second) = across(lanes2);                                                        \
    } while (0)

static double sum_of(const float *restrict x, int64_t n) {
    float lanes[LANES] = {0};
    int64_t start = 0;
    for (; start + LANES <= n; start += LANES) for (int l = 0; l < LANES; l++) lanes[l] += x[start + l];
    for (int l = 0; start + l < n; l++) lanes[l] += x[start + l];
    return across(lanes);
}

/* (2), (3). What the rounded mean left of the sum, `rest`, corrects both. */
static Moments moments_of(const float *restrict x, int64_t n, int centered) {
    float mean = centered ? (float)(sum_of(x, n) / (double)n) : 0.0f;
    double rest, squares;
    SUMS(rest, squares, n, x[i] - mean, (x[i] - mean) * (x[i] - mean));
    if (!centered) return (Moments){(double)n, 0.0, squares};
    return (Moments){(double)n, mean + rest / (double)n, squares - rest * rest / (double)n};
}

static inline Moments merged(Moments p, Moments q, int centered) { /* (14), (15) */
    if (p.count == 0.0) return q;
    double count = p.count + q.count, delta = q.mean - p.mean, share = q.count / count;
    if (!centered) return (Moments){count, 0.0, p.m2 + q.m2};
    return (Moments){count, p.mean + delta * share, p.m2 + q.m2 + delta * delta * p.count * share};
}

/* Merge the moments of n columns of `rows` rows into mean and m2, which are of `before` rows. */
static void merge_columns(double *restrict mean, double *restrict m2, int64_t before, const float *const *x, int64_t rows, int64_t n, int centered) {
    float about[BLOCK / 4], rest[BLOCK / 4], squares[BLOCK / 4];
    float each = 1.0f / (float)rows;
    for (int64_t j = 0; j < n; j++) about[j] = rest[j] = squares[j] = 0.0f;
    if (centered) {
        for (int64_t r = 0; r < rows; r++) for (int64_t j = 0; j < n; j++) about[j] += x[r][j];
        for (int64_t j = 0; j < n; j++) about[j] *= each;
    }
    for (int64_t r = 0; r < rows; r++) {
        const float *restrict row = x[r];
        for (int64_t j = 0; j < n; j++) {
            float d = row[j] - about[j];
            rest[j] += d, squares[j] += d * d;
        }
    }
    double share = (double)rows / (double)(before + rows), weight = share * (double)before, of_rows = 1.0 / (double)rows;
    if (!centered) for (int64_t j = 0; j < n; j++) m2[j] += squares[j];
    else for (int64_t j = 0; j < n; j++) {
        double shift = rest[j] * of_rows, delta = about[j] + shift - mean[j];
        mean[j] += delta * share;
        m2[j] += squares[j] - rest[j] * shift + delta * delta * weight;
    }
}
