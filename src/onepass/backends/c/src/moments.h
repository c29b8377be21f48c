/* Moments: count, mean and m2 of elements, and mean, var and rstd from them.

   The loops sum floats over short blocks. Here their results are merged in double. */
#pragma once
#include "loop_table.h"

/* Column moments are computed for COLUMN_SPAN columns at a time, first over FIRST_ROWS rows, then over MAX_ROWS rows. */
enum { FIRST_ROWS = 16, MAX_ROWS = 64, COLUMN_SPAN = 1024 };

/* Without centering, mean is 0 and m2 is the sum of squares. */
typedef struct { double count, mean, m2; } Moments;

/* mean, var and rstd, (2)-(4), as floats. By (44), two kinds of sets have an rstd of 0, and so an x_hat of 0:
   constant sets without an eps, and sets where x - mean may exceed the largest float.
   The latter also get a mean of 0, since infinity times 0 would be NaN. */
static inline void statistics_from_moments(float *mean, float *var, float *rstd, Moments moments, double eps) {
    double exact_var = moments.m2 < 0.0 ? 0.0 : moments.m2 / moments.count;
    int constant = eps == 0.0 && exact_var < FLT_MIN, overflows = moments.m2 > 0x1p255 && is_number(moments.m2);
    *mean = overflows ? 0.0f : (float)moments.mean, *var = (float)exact_var;
    *rstd = constant || overflows ? 0.0f : (float)(1.0 / sqrt(exact_var + eps));
}

static inline Moments merge_moments(Moments p, Moments q, int centered) { /* (14), (15) */
    if (p.count == 0.0) return q;
    double count = p.count + q.count, delta = q.mean - p.mean, share = q.count / count;
    if (!centered) return (Moments){count, 0.0, p.m2 + q.m2};
    return (Moments){count, p.mean + delta * share, p.m2 + q.m2 + delta * delta * p.count * share};
}

/* Merge the moments of n more elements into `before`. Their deviations are from the mean so far, (42). */
static Moments merge_array(Moments before, TypedArray x, int64_t n, int centered) {
    double mean, m2;
    float known = (float)before.mean;
    loops_for[x.type].row_moments(&mean, &m2, x.data, 0, 1, n, centered, centered && before.count > 0.0 ? &known : NULL);
    return merge_moments(before, (Moments){(double)n, mean, m2}, centered);
}

/* (42), (14) and (15) for each of n columns. `left` and `squares` are sums over `rows` rows about `center`. */
VECTOR_LOOP void merge_column_moments(double *restrict mean, double *restrict m2, const float *restrict center, const float *restrict left,
                                      const float *restrict squares, double before, double rows, int64_t n) {
    double share = rows / (before + rows), weight = share * before, per_row = 1.0 / rows;
    for (int64_t j = 0; j < n; j++) {
        double shift = left[j] * per_row, delta = center[j] + shift - mean[j];
        mean[j] += delta * share;
        m2[j] += squares[j] - left[j] * shift + delta * delta * weight;
    }
}

/* (14) and (15) for each of n columns. mean and m2 describe `before` rows. Add the moments of `rows` more rows, `other`. */
VECTOR_LOOP void merge_double_moments(double *restrict mean, double *restrict m2, const double *restrict other_mean,
                                      const double *restrict other_m2, double before, double rows, int64_t n) {
    double share = rows / (before + rows);
    for (int64_t j = 0; j < n; j++) {
        double delta = other_mean[j] - mean[j];
        mean[j] += delta * share;
        m2[j] = m2[j] + other_m2[j] + delta * delta * before * share;
    }
}

VECTOR_LOOP void add_doubles(double *restrict sum, const double *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

VECTOR_LOOP void add_to_doubles(double *restrict sum, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += x[i];
}

VECTOR_LOOP void multiply_by_scalar(float *restrict x, float by, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] *= by;
}

VECTOR_LOOP void doubles_to_floats(float *restrict to, const double *restrict from, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = (float)from[i];
}

/* Whether is_reliable holds for every column, written so that the compiler vectorizes it. */
VECTOR_LOOP int all_reliable(const float *restrict left, const float *restrict squares, float per_row, float least, int64_t n) {
    int reliable = 1;
    for (int64_t j = 0; j < n; j++) {
        float m2 = squares[j] - left[j] * left[j] * per_row;
        reliable &= (m2 >= least * squares[j]) & (m2 < INFINITY);
    }
    return reliable;
}

/* Merge n columns of `rows` rows into mean and m2, which describe `before` earlier rows.
   The first rows take two passes; later ones take one, by (42). */
static void merge_columns(double *mean, double *m2, int64_t before, const TypedRow *x, int64_t type, int64_t rows, int64_t n,
                          int centered) {
    ALIGNED_FLOAT center[COLUMN_SPAN];
    ALIGNED_FLOAT left[COLUMN_SPAN];
    ALIGNED_FLOAT squares[COLUMN_SPAN];
    fill(left, 0.0f, n), fill(squares, 0.0f, n);
    if (before || !centered) doubles_to_floats(center, mean, n);
    else {
        fill(center, 0.0f, n);
        loops_for[type].add_rows(center, x, rows, n);
        multiply_by_scalar(center, 1.0f / (float)rows, n);
    }
    loops_for[type].add_row_deviations(left, squares, center, x, rows, n);
    if (!centered) fill(left, 0.0f, n);
    if (all_reliable(left, squares, 1.0f / (float)rows, centered && !before ? 0x1p-10f : -1.0f, n)) {
        if (centered) merge_column_moments(mean, m2, center, left, squares, (double)before, (double)rows, n);
        else add_to_doubles(m2, squares, n);
        return;
    }
    double own_mean[COLUMN_SPAN], own_m2[COLUMN_SPAN];
    loops_for[type].column_moments_in_double(own_mean, own_m2, x, rows, n, centered);
    for (int64_t j = 0; j < n; j++) {
        Moments all = merge_moments((Moments){(double)before, mean[j], m2[j]}, (Moments){(double)rows, own_mean[j], own_m2[j]}, centered);
        mean[j] = all.mean, m2[j] = all.m2;
    }
}
