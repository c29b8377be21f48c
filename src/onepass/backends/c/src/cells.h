/* Gradients of parameters. Work is cut into parts by its size alone; each part has cells of its own, in double, for the parameters that it
   meets, and the cells are added up in the order of the parts: sums do not depend on the number of threads. */
#pragma once
#include "parallel.h"
#include "moments.h"

enum { PARTS = 64, PART = 1 << 15 }; /* the most parts; the fewest elements of one */
enum { OFTEN = 32 };                  /* rows after which sums in float go to the cells */
enum { APART = 96 };                  /* elements between two arrays: addresses that agree in their last 12 bits get in each other's way */

typedef struct { int64_t start, count; } Range;
typedef struct { Range range[2]; double *at[4]; } Cells; /* of parameters and modulation; weight, bias, scale, shift; NULL: not wanted */

static inline const Map *map_of(const Problem *p, int which) { return which < 2 ? &p->param : &p->modulation; }

static inline void *wanted(const Tensors *t, int which) {
    return which == 0 ? t->dweight : which == 1 ? t->dbias : which == 2 ? t->dscale : t->dshift;
}

static inline int any_wanted(const Tensors *t) { return t->dweight || t->dbias || t->dscale || t->dshift; }

/* Which parameters the samples o0 to o1 meet. */
static Range range_of(const Problem *p, const Map *m, int64_t o0, int64_t o1) {
    int64_t first = o0 / m->every, last = (o1 - 1) / m->every;
    if (!m->a || last / m->period != first / m->period) return (Range){0, m->size};
    int64_t inside = (p->reps - 1) * m->b + (p->sets - 1) * m->c + (p->run - 1) / m->channel_run * m->d + 1;
    return (Range){first % m->period * m->a, (last - first) * m->a + inside};
}

static int64_t cells_size(const Tensors *t, const Range *range) {
    int64_t count = 0;
    for (int which = 0; which < 4; which++) if (wanted(t, which)) count += range[which / 2].count;
    return aligned(count * 8);
}

/* The ranges of a part that has the samples o0 to o1; returns how many bytes its cells need. */
static int64_t cells_of(Cells *cells, const Problem *p, const Tensors *t, int64_t o0, int64_t o1) {
    for (int k = 0; k < 2; k++) cells->range[k] = range_of(p, map_of(p, 2 * k), o0, o1);
    return cells_size(t, cells->range);
}

static int64_t parts_of(const Problem *p, const Tensors *t) {
    Range ranges[2] = {{0, p->param.size}, {0, p->modulation.size}};
    int64_t total = p->outer * p->reps * width(p), cells = larger(1, cells_size(t, ranges) / 8);
    return larger(1, smaller(PARTS, smaller(total / PART, larger(2, total / (16 * cells)))));
}

/* `memory`: so many bytes. */
static void cells_start(Cells *cells, const Tensors *t, double *memory) {
    for (int which = 0; which < 4; which++) {
        Range range = cells->range[which / 2];
        cells->at[which] = wanted(t, which) ? memory - range.start : NULL;
        if (wanted(t, which)) memset(memory, 0, (size_t)range.count * 8), memory += range.count;
    }
}

/* Add the sums a = Σ dz·x_hat and b = Σ dz of elements that share their parameters. (40) */
static inline void cells_add(const Cells *cells, const Problem *p, const Tensors *t, int64_t param, int64_t modulation, double a, double b) {
    double g = p->scale ? ((const float *)t->scale)[modulation] : 1.0, w = p->weight ? ((const float *)t->weight)[param] : 1.0;
    double bias = p->bias ? ((const float *)t->bias)[param] : 0.0;
    if (cells->at[0]) cells->at[0][param] += g * a;
    if (cells->at[1]) cells->at[1][param] += g * b;
    if (cells->at[2]) cells->at[2][modulation] += w * a + bias * b;
    if (cells->at[3]) cells->at[3][modulation] += b;
}

/* How many columns, from j on, have the parameter of j. */
static inline int64_t shared_after(const Problem *p, const Map *m, int64_t j) {
    int64_t t = rest(j, p->run);
    return m->d ? m->channel_run - rest(t, m->channel_run) : p->run - t;
}

/* The same for columns j0 to j0 + n of a row. */
static void cells_add_columns(const Cells *cells, const Problem *p, const Tensors *t, int64_t o, int64_t r, int64_t j0, int64_t n, const float *restrict a, const float *restrict b) {
    int64_t param = map_base(&p->param, o, r), modulation = map_base(&p->modulation, o, r), first = once(p, n);
    STRIP sums[2][BLOCK];
    if (p->fold > 1 && n > first) {
        fill(sums[0], 0.0f, first), fill(sums[1], 0.0f, first);
        for (int64_t i = 0; i < n; i += first) add(sums[0], a + i, first), add(sums[1], b + i, first);
        a = sums[0], b = sums[1], n = first;
    }
    if (!modulated(p) && is_linear_once(p, &p->param)) {
        if (cells->at[0]) add_wide(cells->at[0] + param + j0, a, n);
        if (cells->at[1]) add_wide(cells->at[1] + param + j0, b, n);
    } else for (int64_t i = 0; i < n;) {
        int64_t j = j0 + i, end = smaller(n, i + smaller(shared_after(p, &p->param, j), shared_after(p, &p->modulation, j)));
        double sum_a = 0.0, sum_b = 0.0;
        for (; i < end; i++) sum_a += a[i], sum_b += b[i];
        cells_add(cells, p, t, map_index(p, &p->param, param, j), map_index(p, &p->modulation, modulation, j), sum_a, sum_b);
    }
}

typedef struct { const Problem *p; const Tensors *t; const Cells *cells; int64_t parts, chunks[4]; } Finish;

/* One chunk of one gradient: its cells, part after part. */
static void finish_task(void *job, int64_t number, void *scratch) {
    const Finish *f = job;
    int which = 0;
    for (; number >= f->chunks[which]; which++) number -= f->chunks[which];
    int64_t types[4] = {f->p->weight, f->p->bias, f->p->scale, f->p->shift}, start = number * BLOCK;
    int64_t end = smaller(start + BLOCK, map_of(f->p, which)->size);
    double sum[BLOCK] = {0};
    float rounded[BLOCK];
    (void)scratch;
    for (int64_t part = 0; part < f->parts; part++) {
        const Cells *cells = f->cells + part;
        Range range = cells->range[which / 2];
        int64_t from = larger(start, range.start), to = smaller(end, range.start + range.count);
        for (int64_t i = from; i < to; i++) sum[i - start] += cells->at[which][i];
    }
    for (int64_t i = 0; i < end - start; i++) rounded[i] = (float)sum[i];
    store(wanted(f->t, which), start, rounded, end - start, types[which]);
}

static void cells_finish(const Problem *p, const Tensors *t, const Cells *cells, int64_t parts, int64_t threads) {
    Finish f = {p, t, cells, parts, {0}};
    int64_t tasks = 0;
    for (int which = 0; which < 4; which++) {
        f.chunks[which] = wanted(t, which) ? pieces_of(map_of(p, which)->size, BLOCK) : 0;
        tasks += f.chunks[which];
    }
    each(finish_task, &f, tasks, threads, NULL, 0);
}
