/* Moments of sets, and of the columns of several rows: what the loops take, merged in double. */
#pragma once
#include "loops_of.h"

enum { FIRST = 16, ROWS = 64, SPAN = 512 }; /* rows whose moments are taken together: the first, the others; columns of them */

typedef struct { double count, mean, m2; } Moments; /* without centering, mean is 0 and m2 the sum of squares */

static inline Moments merged(Moments p, Moments q, int centered) { /* (14), (15) */
    if (p.count == 0.0) return q;
    double count = p.count + q.count, delta = q.mean - p.mean, share = q.count / count;
    if (!centered) return (Moments){count, 0.0, p.m2 + q.m2};
    return (Moments){count, p.mean + delta * share, p.m2 + q.m2 + delta * delta * p.count * share};
}

/* The moments of some elements and of a strip. Its squares are taken about the mean that is known: (42) */
static Moments merged_with(Moments before, Strip x, int64_t n, int centered) {
    double mean, m2;
    float known = (float)before.mean;
    loops_of[x.type].moments(&mean, &m2, x.at, 0, 1, n, centered, centered && before.count > 0.0 ? &known : NULL);
    return merged(before, (Moments){(double)n, mean, m2}, centered);
}

LOOP void merge_into(double *restrict mean, double *restrict m2, const float *restrict about, const float *restrict left, const float *restrict squares,
                     double before, double rows, int64_t n) {
    double share = rows / (before + rows), weight = share * before, of_rows = 1.0 / rows;
    for (int64_t j = 0; j < n; j++) {
        double shift = left[j] * of_rows, delta = about[j] + shift - mean[j];
        mean[j] += delta * share;
        m2[j] += squares[j] - left[j] * shift + delta * delta * weight;
    }
}

LOOP void add_wide(double *restrict sum, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

LOOP void times(float *restrict x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= by;
}

LOOP void narrow(float *restrict to, const double *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = (float)from[i];
}

/* Merge the moments of n columns of `rows` rows into mean and m2, which are of `before` rows; in two passes if there are none, else by (42). */
static void merge_columns(double *mean, double *m2, int64_t before, const Row *x, int64_t type, int64_t rows, int64_t n, int centered) {
    STRIP about[SPAN];
    STRIP left[SPAN];
    STRIP squares[SPAN];
    fill(left, 0.0f, n), fill(squares, 0.0f, n);
    if (before || !centered) narrow(about, mean, n);
    else {
        fill(about, 0.0f, n);
        loops_of[type].add_rows(about, x, rows, n);
        times(about, 1.0f / (float)rows, n);
    }
    loops_of[type].add_rows_about(left, squares, about, x, rows, n);
    if (centered) merge_into(mean, m2, about, left, squares, (double)before, (double)rows, n);
    else add_wide(m2, squares, n);
}
