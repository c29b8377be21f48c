/* The loops over elements, for one type of element T: x, y, dy and dx are of it, everything else is float. loops_of.h includes this once for each
   type. Sums keep their order, so vectors are written out; ROW reads an element of T, AT one of a float array: as vectors, or one by one. */

#define JOIN_(name, type) name##_##type
#define JOIN(name, type) JOIN_(name, type)
#define NAME(name) JOIN(name, T)
#define ROW_V(array) JOIN(get, T)((array) + i)
#define ROW_1(array) JOIN(get1, T)((array) + i)
#define AT_V(array) get_f32((array) + i)
#define AT_1(array) ((array)[i])

/* out[i] = RESULT, for all i < n. */
#define EACH(out, RESULT)                                                                       \
    do {                                                                                        \
        int64_t i = 0;                                                                          \
        for (; i + VL <= n; i += VL) JOIN(put, T)((out) + i, RESULT(ROW_V, AT_V));              \
        for (; i < n; i++) JOIN(put1, T)((out) + i, RESULT(ROW_1, AT_1));                       \
    } while (0)

/* a[i] += FIRST, b[i] += SECOND. */
#define ADD(a, b, FIRST, SECOND)                                                                \
    do {                                                                                        \
        int64_t i = 0;                                                                          \
        for (; i + VL <= n; i += VL) {                                                          \
            V next_a = AT_V(a) + FIRST(ROW_V, AT_V), next_b = AT_V(b) + SECOND(ROW_V, AT_V);    \
            put_f32((a) + i, next_a), put_f32((b) + i, next_b);                                 \
        }                                                                                       \
        for (; i < n; i++) (a)[i] += FIRST(ROW_1, AT_1), (b)[i] += SECOND(ROW_1, AT_1);         \
    } while (0)

/* The sums over i < n: four vectors of sums side by side, one for what they leave, and single elements, each to a lane. No sum of floats is long. */
#define SUMS(sums, FIRST, SECOND)                                                               \
    Pair sums = {0.0, 0.0};                                                                     \
    for (int64_t i = 0; i < n;) {                                                               \
        V f[4] = {{0}}, s[4] = {{0}};                                                           \
        int64_t end = smaller(n, i + BLOCK);                                                    \
        while (i + 4 * VL <= end)                                                               \
            for (int u = 0; u < 4; u++, i += VL) f[u] += FIRST(ROW_V, AT_V), s[u] += SECOND(ROW_V, AT_V); \
        for (; i + VL <= end; i += VL) f[0] += FIRST(ROW_V, AT_V), s[0] += SECOND(ROW_V, AT_V); \
        f[0] = (f[0] + f[1]) + (f[2] + f[3]), s[0] = (s[0] + s[1]) + (s[2] + s[3]);             \
        for (int l = 0; i < end; i++, l++) f[0][l] += FIRST(ROW_1, AT_1), s[0][l] += SECOND(ROW_1, AT_1); \
        sums.one += across(f[0]), sums.two += across(s[0]);                                     \
    }

/* --- along a row ------------------------------------------------------------------------------------------------------------------------------ */

static inline float NAME(sum)(const T *restrict x, int64_t n) {
    V sums[4] = {{0}};
    int64_t i = 0;
    while (i + 4 * VL <= n) for (int u = 0; u < 4; u++, i += VL) sums[u] += ROW_V(x);
    for (; i + VL <= n; i += VL) sums[0] += ROW_V(x);
    sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int l = 0; i < n; i++, l++) sums[0][l] += ROW_1(x);
    return across(sums[0]);
}

#define ABOUT(ROW, AT) (ROW(x) - mean)
#define SQUARE(ROW, AT) ((ROW(x) - mean) * (ROW(x) - mean))

/* (2), (3) in double: floats neither overflow there nor lose a digit. Slow, and rare. */
LOOP void NAME(moments_wide)(double *mean, double *m2, const T *x, int64_t n, int centered) {
    double sum = 0.0, squares = 0.0;
    for (int64_t i = 0; i < n && centered; i++) sum += ROW_1(x);
    *mean = sum / (double)n;
    for (int64_t i = 0; i < n; i++) squares += (ROW_1(x) - *mean) * (ROW_1(x) - *mean);
    *m2 = squares;
}

/* The moments of each of several rows, (2), (3), as mean and m2. What a rounded mean, or the one that is `known`, leaves of the sum corrects both. */
LOOP void NAME(moments)(double *restrict means, double *restrict m2, const void *all, int64_t step, int64_t rows, int64_t n, int centered, const float *known) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all + k * step;
        float mean = known ? *known : centered ? NAME(sum)(x, n) / (float)n : 0.0f;
        SUMS(about, ABOUT, SQUARE)
        double left = centered ? about.one / (double)n : 0.0;
        means[k] = mean + left, m2[k] = about.two - about.one * left;
        if (!is_sound(m2[k], about.two, centered && !known)) NAME(moments_wide)(means + k, m2 + k, x, n, centered);
    }
}

#define NORMALIZED(ROW, AT) ((ROW(x) - mean) * rstd * AT(gain) + AT(term)) /* (4), (5), (31) */
#define NORMALIZED_ALIKE(ROW, AT) ((ROW(x) - mean) * factor + one_term)

LOOP void NAME(normalize)(void *y, const void *all, int64_t step, const float *restrict means, const float *restrict rstds, const float *restrict gain,
                          const float *restrict term, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all + k * step;
        T *restrict out = (T *)y + k * n;
        float mean = means[k], rstd = rstds[k];
        EACH(out, NORMALIZED);
    }
}

LOOP void NAME(normalize_alike)(void *y, const void *row, float mean, float factor, float one_term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    EACH(out, NORMALIZED_ALIKE);
}

#define DZ(ROW, AT) ROW(dz)
#define DZ_ABOUT(ROW, AT) (ROW(dz) * (ROW(x) - mean))
#define WDY(ROW, AT) (AT(gain) * ROW(dz))
#define WDY_ABOUT(ROW, AT) (AT(gain) * ROW(dz) * (ROW(x) - mean))
#define DX(ROW, AT) ((AT(gain) * ROW(dz) - one - (ROW(x) - mean) * two) * rstd) /* (8), with two = c2·rstd */
#define DX_ALIKE(ROW, AT) ((one_gain * ROW(dz) - one - (ROW(x) - mean) * two) * rstd)
#define DZ_X_HAT(ROW, AT) (ROW(dz) * ((ROW(x) - mean) * rstd))

/* The sums below in double, where those in float overflow. Without a gain it is 1. */
LOOP Pair NAME(sums_wide)(const T *x, float mean, const T *dz, const float *gain, int64_t n) {
    Pair sums = {0.0, 0.0};
    for (int64_t i = 0; i < n; i++) {
        double wdy = (gain ? (double)gain[i] : 1.0) * ROW_1(dz);
        sums.one += wdy, sums.two += wdy * ((double)ROW_1(x) - mean);
    }
    return sums;
}

/* Σ dz and Σ dz·(x - mean). */
LOOP Pair NAME(sums_alike)(const void *row, float mean, const void *gradient, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    SUMS(sums, DZ, DZ_ABOUT)
    return is_number(sums.two) ? sums : NAME(sums_wide)(x, mean, dz, NULL, n);
}

/* n·c1 and n·c2 of each row, (6), (7). */
LOOP void NAME(sums)(float *restrict c1, float *restrict c2, const void *all, int64_t step, const float *restrict means, const float *restrict rstds, const void *gradients,
                     const float *restrict gain, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all + k * step, *restrict dz = (const T *)gradients + k * n;
        float mean = means[k];
        SUMS(sums, WDY, WDY_ABOUT)
        if (!is_number(sums.two)) sums = NAME(sums_wide)(x, mean, dz, gain, n);
        c1[k] = (float)sums.one, c2[k] = (float)(sums.two * rstds[k]);
    }
}

/* a += dz·x_hat and b += dz, along rows whose parameters are the same. */
LOOP void NAME(products)(float *restrict a, float *restrict b, const void *all, int64_t step, const float *restrict means, const float *restrict rstds, const void *gradients,
                         int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all + k * step, *restrict dz = (const T *)gradients + k * n;
        float mean = means[k], rstd = rstds[k];
        ADD(a, b, DZ_X_HAT, DZ);
    }
}

/* `scales` are rstd, also where x_hat was taken from y: its mean is then 0 and its rstd 1. */
LOOP void NAME(dx)(void *to, const void *all, int64_t step, const float *restrict means, const float *restrict rstds, const float *restrict scales, const void *gradients,
                   const float *restrict gain, const float *restrict c1, const float *restrict c2, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const T *restrict x = (const T *)all + k * step, *restrict dz = (const T *)gradients + k * n;
        T *restrict out = (T *)to + k * n;
        float mean = means[k], rstd = scales[k], one = c1[k], two = c2[k] * rstds[k];
        EACH(out, DX);
    }
}

LOOP void NAME(dx_alike)(void *to, const void *row, float mean, const void *gradient, float one_gain, float one, float two, float rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    EACH(out, DX_ALIKE);
}

/* --- down columns ----------------------------------------------------------------------------------------------------------------------------- */

/* Sums over four rows at a time: fewer trips to the arrays of sums. */
LOOP void NAME(add_rows)(float *restrict sum, const void *const *rows, int64_t count, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const T *restrict p = rows[r], *restrict q = rows[r + 1], *restrict s = rows[r + 2], *restrict t = rows[r + 3];
        int64_t i = 0;
        for (; i + VL <= n; i += VL) put_f32(sum + i, AT_V(sum) + ((ROW_V(p) + ROW_V(q)) + (ROW_V(s) + ROW_V(t))));
        for (; i < n; i++) sum[i] += (ROW_1(p) + ROW_1(q)) + (ROW_1(s) + ROW_1(t));
    }
    for (; r < count; r++) {
        const T *restrict p = rows[r];
        int64_t i = 0;
        for (; i + VL <= n; i += VL) put_f32(sum + i, AT_V(sum) + ROW_V(p));
        for (; i < n; i++) sum[i] += ROW_1(p);
    }
}

LOOP void NAME(add_rows_about)(float *restrict left, float *restrict squares, const float *restrict about, const void *const *rows, int64_t count, int64_t n) {
    int64_t r = 0;
    for (; r + 4 <= count; r += 4) {
        const T *restrict p = rows[r], *restrict q = rows[r + 1], *restrict s = rows[r + 2], *restrict t = rows[r + 3];
#define FOUR(W, ROW, AT, PUT)                                                                                           \
    W d = ROW(p) - AT(about), e = ROW(q) - AT(about), f = ROW(s) - AT(about), g = ROW(t) - AT(about);                   \
    PUT(left + i, AT(left) + ((d + e) + (f + g))), PUT(squares + i, AT(squares) + ((d * d + e * e) + (f * f + g * g)));
        int64_t i = 0;
        for (; i + VL <= n; i += VL) { FOUR(V, ROW_V, AT_V, put_f32) }
        for (; i < n; i++) { FOUR(float, ROW_1, AT_1, put1_f32) }
#undef FOUR
    }
    for (; r < count; r++) {
        const T *restrict p = rows[r];
        for (int64_t i = 0; i < n; i++) {
            float d = ROW_1(p) - about[i];
            left[i] += d, squares[i] += d * d;
        }
    }
}

/* (2), (3) of each column in double, as moments_wide. */
LOOP void NAME(columns_wide)(double *restrict mean, double *restrict m2, const void *const *rows, int64_t count, int64_t n, int centered) {
    for (int64_t i = 0; i < n; i++) mean[i] = m2[i] = 0.0;
    for (int64_t r = 0; r < count && centered; r++) {
        const T *restrict p = rows[r];
        for (int64_t i = 0; i < n; i++) mean[i] += ROW_1(p);
    }
    for (int64_t i = 0; i < n; i++) mean[i] /= (double)count;
    for (int64_t r = 0; r < count; r++) {
        const T *restrict p = rows[r];
        for (int64_t i = 0; i < n; i++) m2[i] += (ROW_1(p) - mean[i]) * (ROW_1(p) - mean[i]);
    }
}

#define COLUMN(ROW, AT) ((ROW(x) - AT(mean)) * AT(factor) + AT(term))
#define COLUMN_ALIKE(ROW, AT) ((ROW(x) - AT(mean)) * AT(rstd) * one_gain + one_term)

LOOP void NAME(normalize_columns)(void *y, const void *row, const float *restrict mean, const float *restrict factor, const float *restrict term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    EACH(out, COLUMN);
}

LOOP void NAME(normalize_columns_alike)(void *y, const void *row, const float *restrict mean, const float *restrict rstd, float one_gain, float one_term, int64_t n) {
    const T *restrict x = row;
    T *restrict out = y;
    EACH(out, COLUMN_ALIKE);
}

#define DZ_X_HAT_COLUMN(ROW, AT) (ROW(dz) * ((ROW(x) - AT(mean)) * AT(rstd)))
#define WDY_X_HAT_COLUMN(ROW, AT) (AT(gain) * ROW(dz) * ((ROW(x) - AT(mean)) * AT(rstd)))
#define WDY_ALIKE(ROW, AT) (one_gain * ROW(dz))
#define WDY_X_HAT_ALIKE(ROW, AT) (one_gain * ROW(dz) * ((ROW(x) - AT(mean)) * AT(rstd)))
#define DX_COLUMN(ROW, AT) (AT(of_dz) * ROW(dz) + (ROW(x) - AT(mean)) * AT(of_x) + AT(constant))
#define DX_COLUMN_ALIKE(ROW, AT) (one_gain * AT(rstd) * ROW(dz) + (ROW(x) - AT(mean)) * AT(of_x) + AT(constant))

/* a += dz·x_hat and b += dz, column by column; the same of wdy. */
LOOP void NAME(add_columns)(float *restrict a, float *restrict b, const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD(a, b, DZ_X_HAT_COLUMN, DZ);
}

LOOP void NAME(add_columns_weighted)(float *restrict a, float *restrict b, const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd,
                                     const float *restrict gain, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD(a, b, WDY_X_HAT_COLUMN, WDY);
}

LOOP void NAME(add_columns_alike)(float *restrict a, float *restrict b, const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd,
                                  float one_gain, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    ADD(a, b, WDY_X_HAT_ALIKE, WDY_ALIKE);
}

/* Σ dz and Σ dz·x_hat along a row whose columns have statistics of their own; the terms of these sums. */
LOOP Pair NAME(sums_row)(const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    SUMS(sums, DZ, DZ_X_HAT_COLUMN)
    return sums;
}

LOOP void NAME(products_row)(float *restrict a, float *restrict b, const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    for (int64_t i = 0; i < n; i++) a[i] = DZ_X_HAT_COLUMN(ROW_1, AT_1), b[i] = ROW_1(dz);
}

/* (8) as of_dz·dz + of_x·(x - mean) + constant. */
LOOP void NAME(dx_columns)(void *to, const void *row, const void *gradient, const float *restrict mean, const float *restrict of_dz, const float *restrict of_x,
                           const float *restrict constant, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    EACH(out, DX_COLUMN);
}

LOOP void NAME(dx_columns_alike)(void *to, const void *row, const void *gradient, const float *restrict mean, const float *restrict rstd, float one_gain,
                                 const float *restrict of_x, const float *restrict constant, int64_t n) {
    const T *restrict x = row, *restrict dz = gradient;
    T *restrict out = to;
    EACH(out, DX_COLUMN_ALIKE);
}

#define LOOPS_OF(type) {JOIN(moments, type), JOIN(normalize, type), JOIN(normalize_alike, type), JOIN(sums_alike, type), JOIN(sums, type), JOIN(products, type), JOIN(dx, type), JOIN(dx_alike, type), \
    JOIN(add_rows, type), JOIN(add_rows_about, type), JOIN(columns_wide, type), JOIN(normalize_columns, type), JOIN(normalize_columns_alike, type), JOIN(add_columns, type), JOIN(add_columns_weighted, type), \
    JOIN(add_columns_alike, type), JOIN(sums_row, type), JOIN(products_row, type), JOIN(dx_columns, type), JOIN(dx_columns_alike, type)}
