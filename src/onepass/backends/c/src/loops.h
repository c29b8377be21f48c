/* The loops over elements, as templates for one element type T. loop_table.h includes this file once for each type.

   x, y, dz and dx have type T; everything else is float. The compiler may not reorder sums, so vectors are explicit.
   A formula is a macro with two arguments: ELEMENT reads from an array of T and FLOAT from an array of floats.
   Full vectors use ELEMENT_VECTOR and FLOAT_VECTOR, and the remaining elements ELEMENT_ONE and FLOAT_ONE.

   "Uniform" loops have the same gain and term for all elements. Loops named "columns" have statistics for each column. */

#define JOIN_TOKENS(name, type) name##_##type
#define JOIN(name, type) JOIN_TOKENS(name, type)
#define TYPED(name) JOIN(name, T)
#define ELEMENT_VECTOR(array) JOIN(read_vector, T)((array) + i)
#define ELEMENT_ONE(array) JOIN(read_one, T)((array) + i)
#define FLOAT_VECTOR(array) read_vector_f32((array) + i)
#define FLOAT_ONE(array) ((array)[i])
#define LINE (64 / (int)sizeof(T)) /* elements of a cache line */

/* out[i] = RESULT for all i < n. */
#define WRITE_EACH(out, RESULT)                                                                                    \
    do {                                                                                                           \
        int64_t i = 0;                                                                                             \
        for (; i + LANES <= n; i += LANES) JOIN(write_vector, T)((out) + i, RESULT(ELEMENT_VECTOR, FLOAT_VECTOR)); \
        for (; i < n; i++) JOIN(write_one, T)((out) + i, RESULT(ELEMENT_ONE, FLOAT_ONE));                          \
    } while (0)

/* a[i] += FIRST_TERM and b[i] += SECOND_TERM for all i < n. */
#define ADD_TO_EACH(a, b, FIRST_TERM, SECOND_TERM)                                                                      \
    do {                                                                                                                \
        int64_t i = 0;                                                                                                  \
        for (; i + LANES <= n; i += LANES) {                                                                            \
            FloatVector next_a = FLOAT_VECTOR(a) + FIRST_TERM(ELEMENT_VECTOR, FLOAT_VECTOR);                            \
            FloatVector next_b = FLOAT_VECTOR(b) + SECOND_TERM(ELEMENT_VECTOR, FLOAT_VECTOR);                           \
            write_vector_f32((a) + i, next_a), write_vector_f32((b) + i, next_b);                                       \
        }                                                                                                               \
        for (; i < n; i++) (a)[i] += FIRST_TERM(ELEMENT_ONE, FLOAT_ONE), (b)[i] += SECOND_TERM(ELEMENT_ONE, FLOAT_ONE); \
    } while (0)

/* Declare `sums`, the sums of both terms over i < n. Four vectors of floats are summed side by side.
   Float sums end after BLOCK elements and continue in double, so rounding errors stay small. */
#define DECLARE_SUMS(sums, FIRST_TERM, SECOND_TERM)                                                                                     \
    SumPair sums = {0.0, 0.0};                                                                                                          \
    for (int64_t i = 0; i < n;) {                                                                                                       \
        FloatVector first[4] = {{0}}, second[4] = {{0}};                                                                                \
        int64_t end = min(n, i + BLOCK);                                                                                                \
        while (i + 4 * LANES <= end)                                                                                                    \
            for (int vector = 0; vector < 4; vector++, i += LANES)                                                                      \
                first[vector] += FIRST_TERM(ELEMENT_VECTOR, FLOAT_VECTOR), second[vector] += SECOND_TERM(ELEMENT_VECTOR, FLOAT_VECTOR); \
        for (; i + LANES <= end; i += LANES)                                                                                            \
            first[0] += FIRST_TERM(ELEMENT_VECTOR, FLOAT_VECTOR), second[0] += SECOND_TERM(ELEMENT_VECTOR, FLOAT_VECTOR);               \
        first[0] = (first[0] + first[1]) + (first[2] + first[3]), second[0] = (second[0] + second[1]) + (second[2] + second[3]);        \
        for (int lane = 0; i < end; i++, lane++)                                                                                        \
            first[0][lane] += FIRST_TERM(ELEMENT_ONE, FLOAT_ONE), second[0][lane] += SECOND_TERM(ELEMENT_ONE, FLOAT_ONE);               \
        sums.first += sum_lanes(first[0]), sums.second += sum_lanes(second[0]);                                                         \
    }

/* Along a row: all elements of a row have the same mean and rstd. */

static inline float TYPED(row_sum)(const T *restrict x, int64_t n) {
    FloatVector sums[4] = {{0}};
    int64_t i = 0;
    while (i + 4 * LANES <= n) for (int vector = 0; vector < 4; vector++, i += LANES) sums[vector] += ELEMENT_VECTOR(x);
    for (; i + LANES <= n; i += LANES) sums[0] += ELEMENT_VECTOR(x);
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; i < n; i++, lane++) sums[0][lane] += ELEMENT_ONE(x);
    return sum_lanes(sums[0]);
}

#define DEVIATION(ELEMENT, FLOAT) (ELEMENT(x) - mean)
#define SQUARED_DEVIATION(ELEMENT, FLOAT) ((ELEMENT(x) - mean) * (ELEMENT(x) - mean))

/* (2) and (3) in double, where sums of floats neither overflow nor lose digits. This is slow, and rarely needed. */
VECTOR_LOOP void TYPED(moments_in_double)(double *mean, double *m2, const T *x, int64_t n, int centered) {
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < n && centered; i++) sum += ELEMENT_ONE(x);
    *mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (ELEMENT_ONE(x) - *mean) * (ELEMENT_ONE(x) - *mean);
    *m2 = squares;
}

/* Mean and m2 of each of several rows, (2) and (3). Deviations are from a rounded mean, or from `known`, (42).
   Their sum is not exactly 0, and it corrects both results. */
VECTOR_LOOP void TYPED(row_moments)(double *restrict means, double *restrict m2, const void *all_rows, int64_t row_stride, int64_t rows,
                                    int64_t n, int centered, const float *known) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all_rows + k * row_stride;
        float mean = known ? *known : centered ? TYPED(row_sum)(x, n) / (float)n : 0.0f;
        DECLARE_SUMS(deviations, DEVIATION, SQUARED_DEVIATION)
        double left = centered ? deviations.first / (double)n : 0.0;
        means[k] = mean + left, m2[k] = deviations.second - deviations.first * left;
        if (!is_reliable(m2[k], deviations.second, centered && !known)) TYPED(moments_in_double)(means + k, m2 + k, x, n, centered);
    }
}

/* (4), (5) and (31). */
#define NORMALIZED_ROW(ELEMENT, FLOAT) ((ELEMENT(x) - mean) * rstd * FLOAT(gain) + FLOAT(term))
#define NORMALIZED_UNIFORM(ELEMENT, FLOAT) ((ELEMENT(x) - mean) * factor + uniform_term)

VECTOR_LOOP void TYPED(normalize_rows)(void *y, const void *all_rows, int64_t row_stride, const float *restrict means,
                                       const float *restrict rstds, const float *restrict gain, const float *restrict term, int64_t rows,
                                       int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all_rows + k * row_stride;
        T *restrict out = (T *)y + k * n;
        float mean = means[k], rstd = rstds[k];
        WRITE_EACH(out, NORMALIZED_ROW);
    }
}

VECTOR_LOOP void TYPED(normalize_uniform)(void *y, const void *row, float mean, float factor, float uniform_term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    WRITE_EACH(out, NORMALIZED_UNIFORM);
}

/* The terms of (6), (7) and (39), and dx by (8) with set_c2_rstd = c2·rstd. */
#define DZ(ELEMENT, FLOAT) ELEMENT(dz)
#define DZ_DEVIATION(ELEMENT, FLOAT) (ELEMENT(dz) * (ELEMENT(x) - mean))
#define WDY(ELEMENT, FLOAT) (FLOAT(gain) * ELEMENT(dz))
#define WDY_DEVIATION(ELEMENT, FLOAT) (FLOAT(gain) * ELEMENT(dz) * (ELEMENT(x) - mean))
#define DX(ELEMENT, FLOAT) ((FLOAT(gain) * ELEMENT(dz) - set_c1 - (ELEMENT(x) - mean) * set_c2_rstd) * rstd)
#define DX_UNIFORM(ELEMENT, FLOAT) ((uniform_gain * ELEMENT(dz) - set_c1 - (ELEMENT(x) - mean) * set_c2_rstd) * rstd)
#define DZ_X_HAT(ELEMENT, FLOAT) (ELEMENT(dz) * ((ELEMENT(x) - mean) * rstd))

/* Σ wdy and Σ wdy·(x - mean) in double, for when the sums of floats overflow. Without a gain array the gain is 1. */
VECTOR_LOOP SumPair TYPED(gradient_sums_in_double)(const T *x, float mean, const T *dz, const float *gain, int64_t n) {
    SumPair sums = {0.0, 0.0};
    for (int64_t i = 0; i < n; i++) {
        double wdy = (gain ? (double)gain[i] : 1.0) * ELEMENT_ONE(dz);
        sums.first += wdy, sums.second += wdy * ((double)ELEMENT_ONE(x) - mean);
    }
    return sums;
}

/* Σ dz and Σ dz·(x - mean). */
VECTOR_LOOP SumPair TYPED(gradient_sums_uniform)(const void *row, float mean, const void *gradient, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    DECLARE_SUMS(sums, DZ, DZ_DEVIATION)
    return is_number(sums.second) ? sums : TYPED(gradient_sums_in_double)(x, mean, dz, NULL, n);
}

/* n·c1 and n·c2 of each row, (6) and (7). */
VECTOR_LOOP void TYPED(gradient_sums)(float *restrict c1, float *restrict c2, const void *all_rows, int64_t row_stride,
                                      const float *restrict means, const float *restrict rstds, const void *gradients,
                                      const float *restrict gain, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all_rows + k * row_stride, *restrict dz = (const T *)gradients + k * n;
        float mean = means[k];
        DECLARE_SUMS(sums, WDY, WDY_DEVIATION)
        if (!is_number(sums.second)) sums = TYPED(gradient_sums_in_double)(x, mean, dz, gain, n);
        c1[k] = (float)sums.first, c2[k] = (float)(sums.second * rstds[k]);
    }
}

/* a += dz·x_hat and b += dz, (39), over rows that use the same parameters. */
VECTOR_LOOP void TYPED(add_products)(float *restrict a, float *restrict b, const void *all_rows, int64_t row_stride,
                                     const float *restrict means, const float *restrict rstds, const void *gradients, int64_t rows,
                                     int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all_rows + k * row_stride, *restrict dz = (const T *)gradients + k * n;
        float mean = means[k], rstd = rstds[k];
        ADD_TO_EACH(a, b, DZ_X_HAT, DZ);
    }
}

/* (8) for each row. dx_rstds are always the sets' rstd. means and rstds turn x into x_hat:
   where x already is x_hat, taken from y, they are 0 and 1. */
VECTOR_LOOP void TYPED(dx_rows)(void *to, const void *all_rows, int64_t row_stride, const float *restrict means,
                                const float *restrict rstds, const float *restrict dx_rstds, const void *gradients,
                                const float *restrict gain, const float *restrict c1, const float *restrict c2, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all_rows + k * row_stride, *restrict dz = (const T *)gradients + k * n;
        T *restrict out = (T *)to + k * n;
        float mean = means[k], rstd = dx_rstds[k], set_c1 = c1[k], set_c2_rstd = c2[k] * rstds[k];
        WRITE_EACH(out, DX);
    }
}

VECTOR_LOOP void TYPED(dx_uniform)(void *to, const void *row, float mean, const void *gradient, float uniform_gain, float set_c1,
                                   float set_c2_rstd, float rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    WRITE_EACH(out, DX_UNIFORM);
}

/* Down columns: each column of a row has its own mean and rstd. */

/* sum += each row. Four rows at a time read and write `sum` less often. */
VECTOR_LOOP void TYPED(add_rows)(float *restrict sum, const void *const *rows, int64_t count, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const T *restrict row0 = rows[r], *restrict row1 = rows[r + 1], *restrict row2 = rows[r + 2], *restrict row3 = rows[r + 3];
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES)
            write_vector_f32(sum + i, FLOAT_VECTOR(sum) + ((ELEMENT_VECTOR(row0) + ELEMENT_VECTOR(row1)) +
                                                           (ELEMENT_VECTOR(row2) + ELEMENT_VECTOR(row3))));
        for (; i < n; i++) sum[i] += (ELEMENT_ONE(row0) + ELEMENT_ONE(row1)) + (ELEMENT_ONE(row2) + ELEMENT_ONE(row3));
    }
    for (; r < count; r++) {
        const T *restrict row0 = rows[r];
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) write_vector_f32(sum + i, FLOAT_VECTOR(sum) + ELEMENT_VECTOR(row0));
        for (; i < n; i++) sum[i] += ELEMENT_ONE(row0);
    }
}

/* left += x - center and squares += (x - center)² for each row, (42). */
VECTOR_LOOP void TYPED(add_row_deviations)(float *restrict left, float *restrict squares, const float *restrict center,
                                           const void *const *rows, int64_t count, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const T *restrict row0 = rows[r], *restrict row1 = rows[r + 1], *restrict row2 = rows[r + 2], *restrict row3 = rows[r + 3];
#define ADD_FOUR_ROWS(VALUE, ELEMENT, FLOAT, WRITE)                               \
    VALUE d0 = ELEMENT(row0) - FLOAT(center), d1 = ELEMENT(row1) - FLOAT(center); \
    VALUE d2 = ELEMENT(row2) - FLOAT(center), d3 = ELEMENT(row3) - FLOAT(center); \
    WRITE(left + i, FLOAT(left) + ((d0 + d1) + (d2 + d3)));                       \
    WRITE(squares + i, FLOAT(squares) + ((d0 * d0 + d1 * d1) + (d2 * d2 + d3 * d3)));
        const T *const *next = (const T *const *)rows + (r + 8 <= count ? r + 4 : r);
        int64_t i = 0;
        while (i + LINE <= n) {
            for (int k = 0; k < 4; k++) prefetch_line(next[k] + i);
            for (int k = 0; k < LINE; k += LANES, i += LANES) { ADD_FOUR_ROWS(FloatVector, ELEMENT_VECTOR, FLOAT_VECTOR, write_vector_f32) }
        }
        for (; i + LANES <= n; i += LANES) { ADD_FOUR_ROWS(FloatVector, ELEMENT_VECTOR, FLOAT_VECTOR, write_vector_f32) }
        for (; i < n; i++) { ADD_FOUR_ROWS(float, ELEMENT_ONE, FLOAT_ONE, write_one_f32) }
#undef ADD_FOUR_ROWS
    }
    for (; r < count; r++) {
        const T *restrict row0 = rows[r];
        for (int64_t i = 0; i < n; i++) {
            float d0 = ELEMENT_ONE(row0) - center[i];
            left[i] += d0, squares[i] += d0 * d0;
        }
    }
}

/* (2) and (3) of each column in double, for the same reason as moments_in_double. */
VECTOR_LOOP void TYPED(column_moments_in_double)(double *restrict mean, double *restrict m2, const void *const *rows, int64_t count,
                                                 int64_t n, int centered) {
    for (int64_t i = 0; i < n; i++) mean[i] = m2[i] = 0.0;
    for (int64_t r = 0; r < count && centered; r++) {
        const T *restrict row = rows[r];
        for (int64_t i = 0; i < n; i++) mean[i] += ELEMENT_ONE(row);
    }
    for (int64_t i = 0; i < n; i++) mean[i] /= (double)count;
    for (int64_t r = 0; r < count; r++) {
        const T *restrict row = rows[r];
        for (int64_t i = 0; i < n; i++) m2[i] += (ELEMENT_ONE(row) - mean[i]) * (ELEMENT_ONE(row) - mean[i]);
    }
}

#define NORMALIZED_COLUMN(ELEMENT, FLOAT) ((ELEMENT(x) - FLOAT(mean)) * FLOAT(factor) + FLOAT(term))
#define NORMALIZED_COLUMN_UNIFORM(ELEMENT, FLOAT) ((ELEMENT(x) - FLOAT(mean)) * FLOAT(rstd) * uniform_gain + uniform_term)

VECTOR_LOOP void TYPED(normalize_columns)(void *y, const void *row, const float *restrict mean, const float *restrict factor,
                                          const float *restrict term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    WRITE_EACH(out, NORMALIZED_COLUMN);
}

/* As normalize_columns, for two rows at a time. mean, factor and term are read once for both.
   8 images of 128×128×128 in float32 took 7.1 ms with one row at a time, 7.3 ms with two, and 6.2 ms with the prefetches, too. Torch
   took 6.5 ms (two Neoverse-N1 cores, November 2026). 64 lines ahead took 6.6 ms, and 256 took 6.3 ms. */
VECTOR_LOOP void TYPED(normalize_two_rows)(void *y0, void *y1, const void *row0, const void *row1, const float *restrict mean,
                                           const float *restrict factor, const float *restrict term, int64_t n) {
    const T *restrict x0 = row0, *restrict x1 = row1;
    T *restrict out0 = y0, *restrict out1 = y1;
#define NORMALIZE_TWO(VALUE, ELEMENT, FLOAT, WRITE)                                   \
    VALUE center = FLOAT(mean), scale = FLOAT(factor), shift = FLOAT(term);           \
    VALUE first = (ELEMENT(x0) - center) * scale + shift;                             \
    VALUE second = (ELEMENT(x1) - center) * scale + shift;                            \
    WRITE(out0 + i, first), WRITE(out1 + i, second);
    int64_t i = 0;
    while (i + LINE <= n) {
        prefetch_line(x0 + i + LINES_AHEAD * LINE), prefetch_line(x1 + i + LINES_AHEAD * LINE);
        for (int k = 0; k < LINE; k += LANES, i += LANES) { NORMALIZE_TWO(FloatVector, ELEMENT_VECTOR, FLOAT_VECTOR, JOIN(write_vector, T)) }
    }
    for (; i + LANES <= n; i += LANES) { NORMALIZE_TWO(FloatVector, ELEMENT_VECTOR, FLOAT_VECTOR, JOIN(write_vector, T)) }
    for (; i < n; i++) { NORMALIZE_TWO(float, ELEMENT_ONE, FLOAT_ONE, JOIN(write_one, T)) }
#undef NORMALIZE_TWO
}

VECTOR_LOOP void TYPED(normalize_columns_uniform)(void *y, const void *row, const float *restrict mean, const float *restrict rstd,
                                                  float uniform_gain, float uniform_term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    WRITE_EACH(out, NORMALIZED_COLUMN_UNIFORM);
}

#define DZ_X_HAT_COLUMN(ELEMENT, FLOAT) (ELEMENT(dz) * ((ELEMENT(x) - FLOAT(mean)) * FLOAT(rstd)))
#define WDY_X_HAT_COLUMN(ELEMENT, FLOAT) (FLOAT(gain) * ELEMENT(dz) * ((ELEMENT(x) - FLOAT(mean)) * FLOAT(rstd)))
#define WDY_UNIFORM(ELEMENT, FLOAT) (uniform_gain * ELEMENT(dz))
#define WDY_X_HAT_UNIFORM(ELEMENT, FLOAT) (uniform_gain * ELEMENT(dz) * ((ELEMENT(x) - FLOAT(mean)) * FLOAT(rstd)))
#define DX_COLUMN(ELEMENT, FLOAT) (FLOAT(dz_factor) * ELEMENT(dz) + (ELEMENT(x) - FLOAT(mean)) * FLOAT(x_factor) + FLOAT(constant))
#define DX_COLUMN_UNIFORM(ELEMENT, FLOAT) \
    (uniform_gain * FLOAT(rstd) * ELEMENT(dz) + (ELEMENT(x) - FLOAT(mean)) * FLOAT(x_factor) + FLOAT(constant))

/* a += dz·x_hat and b += dz for each column. The weighted and uniform loops add wdy·x_hat and wdy. */
VECTOR_LOOP void TYPED(add_column_products)(float *restrict a, float *restrict b, const void *row, const void *gradient,
                                            const float *restrict mean, const float *restrict rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD_TO_EACH(a, b, DZ_X_HAT_COLUMN, DZ);
}

VECTOR_LOOP void TYPED(add_column_products_weighted)(float *restrict a, float *restrict b, const void *row, const void *gradient,
                                                     const float *restrict mean, const float *restrict rstd, const float *restrict gain,
                                                     int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD_TO_EACH(a, b, WDY_X_HAT_COLUMN, WDY);
}

VECTOR_LOOP void TYPED(add_column_products_uniform)(float *restrict a, float *restrict b, const void *row, const void *gradient,
                                                    const float *restrict mean, const float *restrict rstd, float uniform_gain,
                                                    int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD_TO_EACH(a, b, WDY_X_HAT_UNIFORM, WDY_UNIFORM);
}

/* Σ dz and Σ dz·x_hat along a row whose columns have their own statistics. */
VECTOR_LOOP SumPair TYPED(row_sums)(const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd,
                                    int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    DECLARE_SUMS(sums, DZ, DZ_X_HAT_COLUMN)
    return sums;
}

/* The terms of these two sums: a = dz·x_hat and b = dz. */
VECTOR_LOOP void TYPED(row_products)(float *restrict a, float *restrict b, const void *row, const void *gradient,
                                     const float *restrict mean, const float *restrict rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    for (int64_t i = 0; i < n; i++) a[i] = DZ_X_HAT_COLUMN(ELEMENT_ONE, FLOAT_ONE), b[i] = ELEMENT_ONE(dz);
}

/* (8) as dz_factor·dz + x_factor·(x - mean) + constant. */
VECTOR_LOOP void TYPED(dx_columns)(void *to, const void *row, const void *gradient, const float *restrict mean,
                                   const float *restrict dz_factor, const float *restrict x_factor, const float *restrict constant,
                                   int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    WRITE_EACH(out, DX_COLUMN);
}

VECTOR_LOOP void TYPED(dx_columns_uniform)(void *to, const void *row, const void *gradient, const float *restrict mean,
                                           const float *restrict rstd, float uniform_gain, const float *restrict x_factor,
                                           const float *restrict constant, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    WRITE_EACH(out, DX_COLUMN_UNIFORM);
}

#define LOOP_TABLE(type) {                                                                                            \
    JOIN(row_moments, type), JOIN(normalize_rows, type), JOIN(normalize_uniform, type),                               \
    JOIN(gradient_sums_uniform, type), JOIN(gradient_sums, type), JOIN(add_products, type),                           \
    JOIN(dx_rows, type), JOIN(dx_uniform, type), JOIN(add_rows, type),                                                \
    JOIN(add_row_deviations, type), JOIN(column_moments_in_double, type), JOIN(normalize_columns, type),              \
    JOIN(normalize_two_rows, type),                                                                                   \
    JOIN(normalize_columns_uniform, type), JOIN(add_column_products, type), JOIN(add_column_products_weighted, type), \
    JOIN(add_column_products_uniform, type), JOIN(row_sums, type), JOIN(row_products, type),                          \
    JOIN(dx_columns, type), JOIN(dx_columns_uniform, type),                                                           \
}
