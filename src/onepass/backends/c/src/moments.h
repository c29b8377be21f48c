/* Moments of sets, and of the columns of several rows: what the loops take, merged in double. */
#pragma once
#include "loops_of.h"

enum { FIRST = 16, ROWS = 64, SPAN = 512 }; /* rows whose moments are taken together: the first, the others; columns of them */

typedef struct { double count, mean, m2; } Moments; /* without centering, mean is 0 and m2 the sum of squares */

/* mean, var and rstd, (2)-(4), as floats. Two kinds of sets have an rstd of 0, and so an x_hat of 0, (44): constant ones without an eps, and those
   whose x - mean may exceed the largest float; with a mean of 0 that is not infinite times 0. */
static inline void as_statistics(float *mean, float *var, float *rstd, Moments taken, double eps) {
    double exact = taken.m2 < 0.0 ? 0.0 : taken.m2 / taken.count;
    int constant = eps == 0.0 && exact < FLT_MIN, vast = taken.m2 > 0x1p255 && is_number(taken.m2);
    *mean = vast ? 0.0f : (float)taken.mean, *var = (float)exact;
    *rstd = constant || vast ? 0.0f : (float)(1.0 / sqrt(exact + eps));
}

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

/* Whether all columns have sound moments, is_sound; by rules that a compiler vectorizes. */
LOOP int all_sound(const float *restrict left, const float *restrict squares, float of_rows, float least, int64_t n) {
    int sound = 1;
    for (int64_t j = 0; j < n; j++) {
        float m2 = squares[j] - left[j] * left[j] * of_rows;
        sound &= (m2 >= least * squares[j]) & (m2 < INFINITY);
    }
    return sound;
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
    if (!centered) fill(left, 0.0f, n);
    if (all_sound(left, squares, 1.0f / (float)rows, centered && !before ? 0x1p-10f : -1.0f, n)) {
        if (centered) merge_into(mean, m2, about, left, squares, (double)before, (double)rows, n);
        else add_wide(m2, squares, n);
        return;
    }
    double own_mean[SPAN], own_m2[SPAN];
    loops_of[type].columns_wide(own_mean, own_m2, x, rows, n, centered);
    for (int64_t j = 0; j < n; j++) {
        Moments all = merged((Moments){(double)before, mean[j], m2[j]}, (Moments){(double)rows, own_mean[j], own_m2[j]}, centered);
        mean[j] = all.mean, m2[j] = all.m2;
    }
}
