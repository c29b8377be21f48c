/* What the kernels know of a problem: the view, the parameter maps and the operands of a call. native.py has the first two structures, too. */
#pragma once
#include "activations.h"

enum { BLOCK = 1024 };              /* elements of a strip: several of them fit the smallest first-level cache */
enum { SLOTS = 16, LONGEST = 4096 }; /* strips of parameters that are kept; elements of one, which may take the place of several */
enum { PIECE = 1 << 16 };           /* elements of a piece of a set that is shared */

typedef struct { int64_t every, period, a, b, c, channel_run, d, size; } Map; /* (1); size: how many parameters there are */

typedef struct {
    int64_t outer, reps, sets, run;
    int64_t xo, xr, xs;                                    /* strides of x in elements; all else that has x's shape is dense */
    int64_t x, residual, type, weight, bias, scale, shift; /* types; `type` is that of the sum, and of y, dy and dx */
    int64_t activation, centered, given, from_y, tile;
    int64_t fold;                                          /* so many narrow rows of a tile are one: reps and xr are of those */
    double eps, offset;
    Map param, modulation;
} Problem;

typedef struct {
    const void *x, *residual, *weight, *bias, *scale, *shift; /* parameters become floats first, offset and 1 added: `parameters` */
    float *mean, *rstd, *var;                                 /* (outer, sets) each; taken, or given; NULL where nobody asks */
    void *y, *sum;
    const void *dy, *dsum;
    void *dx, *dweight, *dbias, *dscale, *dshift;
    float *c1, *c2;
} Tensors;

/* Zeros of any type, as long as the longest block: the x of a dx that depends on none. */
static const STRIP nothing[LONGEST];

static inline int64_t width(const Problem *p) { return p->fold * p->sets * p->run; }
static inline int64_t set_of(const Problem *p, int64_t j) { return rest(over(j, p->run), p->sets); }
static inline int64_t dense(const Problem *p, int64_t o, int64_t r, int64_t j) { return (o * p->reps + r) * width(p) + j; }
static inline int64_t map_base(const Map *m, int64_t o, int64_t r) { return m->a ? rest(over(o, m->every), m->period) * m->a + r * m->b : r * m->b; }

static inline int64_t map_index(const Problem *p, const Map *m, int64_t base, int64_t j) {
    return base + (m->c ? set_of(p, j) * m->c : 0) + (m->d ? over(rest(j, p->run), m->channel_run) * m->d : 0);
}

/* Whether consecutive columns use consecutive parameters; whether all columns use the same. */
static inline int is_linear_once(const Problem *p, const Map *m) { /* up to where a folded row repeats */
    if (p->run == 1) return m->c == 1 || p->sets == 1;
    return m->d == 1 && m->channel_run == 1 && (p->sets == 1 || m->c == p->run);
}
static inline int is_linear(const Problem *p, const Map *m) { return p->fold == 1 && is_linear_once(p, m); }
static inline int is_constant(const Problem *p, const Map *m) { return (p->sets == 1 || !m->c) && !m->d; }
static inline int affine(const Problem *p) { return p->weight || p->bias; }
static inline int modulated(const Problem *p) { return p->scale || p->shift; }

/* Folded rows are no wider than a block: they repeat what their first columns have. */
static inline int64_t once(const Problem *p, int64_t n) { return smaller(n, p->sets * p->run); }
static void repeat(float *to, int64_t first, int64_t n) {
    for (int64_t i = first; i < n; i += first) memcpy(to + i, to, (size_t)smaller(first, n - i) * 4);
}

/* The parameters of columns j0 to j0 + n of a row. */
static void spread(float *restrict to, const float *restrict from, const Problem *p, const Map *m, int64_t base, int64_t j0, int64_t n) {
    if (p->fold > 1 && n > once(p, n)) {
        spread(to, from, p, m, base, 0, once(p, n));
        repeat(to, once(p, n), n);
    } else if (is_constant(p, m)) fill(to, from[base], n);
    else if (is_linear_once(p, m)) memcpy(to, from + base + j0, (size_t)n * 4);
    else {
        int64_t s = set_of(p, j0), t = rest(j0, p->run), length = m->d ? m->channel_run : p->run, channel = m->d ? over(t, length) : 0, within = t - channel * length;
        for (int64_t i = 0; i < n; within = 0, channel++) {
            if (channel * length == p->run) channel = 0, s = s + 1 == p->sets ? 0 : s + 1;
            float value = from[base + s * m->c + channel * m->d];
            for (int64_t end = smaller(n, i + length - within); i < end; i++) to[i] = value;
        }
    }
}

/* z = x_hat·gain + term for consecutive columns of a row: (5) and (31) folded. Kept while rows use the same parameters. */
typedef struct { const float *gain, *term; int64_t param, modulation, j0, n; } Slot; /* what they are of */

typedef struct {
    Slot slots[SLOTS];
    STRIP gains[SLOTS * BLOCK];
    STRIP terms[SLOTS * BLOCK];
    STRIP buffer[LONGEST];
} Affine;

static void affine_start(Affine *affine) { for (int i = 0; i < SLOTS; i++) affine->slots[i].n = -1; }

static const Slot *affine_at(Affine *affine, const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j0, int64_t n) {
    int number = (int)(j0 / BLOCK % SLOTS);
    Slot *slot = affine->slots + number;
    float *gains = affine->gains + number * BLOCK, *terms = affine->terms + number * BLOCK;
    int64_t param = map_base(&p->param, o, r), modulation = map_base(&p->modulation, o, r);
    if (slot->n == n && slot->j0 == j0 && slot->param == param && slot->modulation == modulation) return slot;
    slot->param = param, slot->modulation = modulation, slot->j0 = j0, slot->n = n;
    slot->gain = gains, slot->term = terms;
    int direct = !p->scale && is_linear(p, &p->param);
    if (direct && p->weight) slot->gain = (const float *)t->weight + param + j0;
    else if (p->weight) spread(gains, t->weight, p, &p->param, param, j0, n);
    else fill(gains, 1.0f, n);
    if (direct && p->bias && !p->shift) slot->term = (const float *)t->bias + param + j0;
    else if (p->bias) spread(terms, t->bias, p, &p->param, param, j0, n);
    else fill(terms, 0.0f, n);
    if (p->scale) {
        spread(affine->buffer, t->scale, p, &p->modulation, modulation, j0, n);
        multiply(gains, affine->buffer, n);
        multiply(terms, affine->buffer, n);
    }
    if (p->shift) {
        spread(affine->buffer, t->shift, p, &p->modulation, modulation, j0, n);
        add(terms, affine->buffer, n);
    }
    return slot;
}

/* The same where columns share their parameters. */
static inline void constants_at(const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j, float *gain, float *term) {
    int64_t param = map_index(p, &p->param, map_base(&p->param, o, r), j);
    int64_t modulation = map_index(p, &p->modulation, map_base(&p->modulation, o, r), j);
    *gain = p->weight ? ((const float *)t->weight)[param] : 1.0f, *term = p->bias ? ((const float *)t->bias)[param] : 0.0f;
    if (p->scale) *gain *= ((const float *)t->scale)[modulation], *term *= ((const float *)t->scale)[modulation];
    if (p->shift) *term += ((const float *)t->shift)[modulation];
}

/* How many columns share all their parameters, from one boundary to the next, within a run. */
static int64_t atom_of(const Problem *p) {
    int64_t atom = affine(p) && p->param.d ? p->param.channel_run : p->run;
    int64_t other = modulated(p) && p->modulation.d ? p->modulation.channel_run : p->run;
    while (other) { int64_t rest = atom % other; atom = other, other = rest; }
    return atom;
}

static inline int64_t in_x(const Problem *p, int64_t o, int64_t r, int64_t j0) {
    return o * p->xo + r * p->xr + (p->sets == 1 || p->xs == p->run ? j0 : over(j0, p->run) * p->xs + rest(j0, p->run));
}

/* Consecutive elements, of a type. */
typedef struct { const void *at; int64_t type; } Strip;

static const float *as_floats(Strip x, int64_t n, float *strip) { return floats(x.at, 0, n, x.type, strip); }

/* What is normalized, columns j0 to j0 + n of a row. The first time, a residual is added, and the sum rounded and written. */
static Strip normalized(const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j0, int64_t n, int first, float *strip) {
    int64_t at = dense(p, o, r, j0);
    if (!p->residual) return (Strip){there(t->x, in_x(p, o, r, j0), p->x), p->x};
    if (!first) return (Strip){there(t->sum, at, p->type), p->type};
    STRIP other[BLOCK];
    load(strip, t->x, in_x(p, o, r, j0), n, p->x);
    add(strip, floats(t->residual, at, n, p->residual, other), n);
    store(t->sum, at, strip, n, p->type);
    return (Strip){there(t->sum, at, p->type), p->type};
}

/* How a strip becomes a part of y, or of dx: by the loops of its type, or, where something else follows, as floats. */
typedef struct { int64_t type; const void *x; void *out; } Way;

static Way way_of(const Problem *p, int plain, Strip x, void *to, int64_t at, int64_t n, float *in, float *out) {
    if (plain && x.type == p->type) return (Way){p->type, x.at, place(to, at, p->type)};
    return (Way){F32, as_floats(x, n, in), p->type == F32 ? place(to, at, F32) : out};
}
