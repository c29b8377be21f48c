/* What the kernels know of a problem: the view, the parameter maps and the operands of a call. native.py has the same structures. */
#pragma once
#include "numbers.h"

enum { BLOCK = 2048 };      /* elements of a strip: a few of them fit the smallest first-level cache */
enum { PIECE = 1 << 16 };   /* elements of a piece of a set that is shared */

typedef struct { int64_t every, period, a, b, c, channel_run, d, size; } Map; /* (1); size: how many parameters there are */

typedef struct {
    int64_t outer, reps, sets, run;
    int64_t xo, xr, xs;                               /* strides of x in elements; all else that has x's shape is dense */
    int64_t x, residual, type, weight, bias, scale, shift; /* types; `type` is that of the sum, and of y, dy and dx */
    int64_t activation, centered, given, from_y, tile;
    double eps, offset;
    Map param, modulation;
} Problem;

typedef struct {
    const void *x, *residual, *weight, *bias, *scale, *shift;
    float *mean, *rstd, *var;                         /* (outer, sets) each; taken, or given; NULL where nobody asks */
    void *y, *sum;
    const void *dy, *dsum;
    void *dx, *dweight, *dbias, *dscale, *dshift;
    float *c1, *c2;
} Tensors;

static inline int64_t width(const Problem *p) { return p->sets * p->run; }
static inline int64_t dense(const Problem *p, int64_t o, int64_t r, int64_t j) { return (o * p->reps + r) * width(p) + j; }
static inline int64_t map_base(const Map *m, int64_t o, int64_t r) { return o / m->every % m->period * m->a + r * m->b; }

static inline int64_t map_index(const Map *m, int64_t base, int64_t run, int64_t j) {
    return base + j / run * m->c + j % run / m->channel_run * m->d;
}

/* Whether consecutive columns use consecutive parameters. */
static inline int is_linear(const Problem *p, const Map *m) {
    if (p->run == 1) return m->c == 1;
    return m->d == 1 && m->channel_run == 1 && (p->sets == 1 || m->c == p->run);
}

/* The parameters of columns j0 to j0 + n of a row, as floats plus `offset`. */
static void spread(float *restrict to, const void *from, int64_t type, float offset, const Problem *p, const Map *m, int64_t base, int64_t j0, int64_t n) {
    if (is_linear(p, m)) load(to, from, base + j0, n, type);
    else for (int64_t j = j0; j < j0 + n;) {
        int64_t s = j / p->run, t = j % p->run, channel = t / m->channel_run;
        int64_t end = smaller(j0 + n, s * p->run + (m->d ? (channel + 1) * m->channel_run : p->run));
        float value = load_one(from, base + s * m->c + channel * m->d, type);
        for (; j < end; j++) to[j - j0] = value;
    }
    if (offset != 0.0f) for (int64_t i = 0; i < n; i++) to[i] += offset;
}

/* z = x_hat·gain + term for consecutive columns of a row: (5) and (31) folded. Kept while the next row uses the same parameters. */
typedef struct {
    const float *gain, *term;
    int64_t param, modulation, j0, n; /* what they are of */
    float gains[BLOCK], terms[BLOCK], buffer[BLOCK];
} Affine;

static void affine_start(Affine *affine) { affine->n = -1; }

static void affine_at(Affine *affine, const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j0, int64_t n) {
    int64_t param = map_base(&p->param, o, r), modulation = map_base(&p->modulation, o, r);
    if (affine->n == n && affine->j0 == j0 && affine->param == param && affine->modulation == modulation) return;
    affine->param = param, affine->modulation = modulation, affine->j0 = j0, affine->n = n;
    affine->gain = affine->gains, affine->term = affine->terms;
    int direct = p->scale == NONE && is_linear(p, &p->param);
    float *gain = affine->gains, *term = affine->terms, *buffer = affine->buffer;
    if (direct && p->weight == F32 && p->offset == 0.0) affine->gain = (const float *)t->weight + param + j0;
    else if (p->weight) spread(gain, t->weight, p->weight, (float)p->offset, p, &p->param, param, j0, n);
    else for (int64_t i = 0; i < n; i++) gain[i] = 1.0f;
    if (direct && p->bias == F32 && p->shift == NONE) affine->term = (const float *)t->bias + param + j0;
    else if (p->bias) spread(term, t->bias, p->bias, 0.0f, p, &p->param, param, j0, n);
    else for (int64_t i = 0; i < n; i++) term[i] = 0.0f;
    if (p->scale) {
        spread(buffer, t->scale, p->scale, 1.0f, p, &p->modulation, modulation, j0, n);
        for (int64_t i = 0; i < n; i++) gain[i] *= buffer[i], term[i] *= buffer[i];
    }
    if (p->shift) {
        spread(buffer, t->shift, p->shift, 0.0f, p, &p->modulation, modulation, j0, n);
        for (int64_t i = 0; i < n; i++) term[i] += buffer[i];
    }
}

/* What is normalized, columns j0 to j0 + n of a row, as floats. The first time, a residual is added, and the sum rounded and written. */
static const float *normalized(const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j0, int64_t n, int first, float *strip) {
    int64_t at = dense(p, o, r, j0), in_x = o * p->xo + r * p->xr + (p->sets == 1 || p->xs == p->run ? j0 : j0 / p->run * p->xs + j0 % p->run);
    if (!p->residual) return floats(t->x, in_x, n, p->x, strip);
    if (!first) return floats(t->sum, at, n, p->type, strip);
    float other[BLOCK];
    load(strip, t->x, in_x, n, p->x);
    const float *residual = floats(t->residual, at, n, p->residual, other);
    for (int64_t i = 0; i < n; i++) strip[i] += residual[i];
    store(t->sum, at, strip, n, p->type);
    if (p->type != F32) load(strip, t->sum, at, n, p->type);
    return strip;
}
