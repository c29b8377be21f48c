/* The row walk where sets are short: several rows at a time, a pack, so that what each row costs beside its elements is shared. */
#pragma once
#include "cells.h"
#include "moments.h"

enum { SHORT = LONGEST, PACK = LONGEST, MOST = 256 }; /* elements of a row and of a pack; rows of a pack */

typedef struct { const Problem *p; const Tensors *t; Cells *cells; int64_t parts, per_task; int sums; } Packs;

/* Whether a problem is walked in packs: sets of one short run, whose elements find their parameters by t alone. */
static int packs_fit(const Problem *p) {
    int by_sets = p->sets > 1 && ((affine(p) && p->param.c) || (modulated(p) && p->modulation.c));
    int by_samples = (affine(p) && p->param.a && p->param.every == 1) || (modulated(p) && p->modulation.a && p->modulation.every == 1);
    return p->reps == 1 && p->run <= SHORT && !by_sets && !(by_samples && p->sets == 1);
}

/* Rows that follow one another evenly: those of a sample, or, where it has one, of samples that use the same parameters. */
typedef struct { int64_t o, s, rows, at, in_x, step; } Pack;

static Pack pack_at(const Problem *p, int64_t row, int64_t end) {
    int64_t o = over(row, p->sets), s = row - o * p->sets, rows = smaller(p->run > BLOCK ? 1 : smaller(MOST, PACK / p->run), end - row);
    if (p->sets > 1) rows = smaller(rows, p->sets - s);
    else {
        if (affine(p) && p->param.a) rows = smaller(rows, (over(o, p->param.every) + 1) * p->param.every - o);
        if (modulated(p) && p->modulation.a) rows = smaller(rows, (over(o, p->modulation.every) + 1) * p->modulation.every - o);
    }
    return (Pack){o, s, rows, row * p->run, o * p->xo + s * p->xs, p->sets > 1 ? p->xs : p->xo};
}

typedef struct {
    Affine affine;
    STRIP x[PACK];
    STRIP other[PACK];
    STRIP dy[PACK];
    STRIP dz[PACK];
    STRIP a[SHORT + APART];
    STRIP b[SHORT + APART];
    float mean[MOST], rstd[MOST], var[MOST], zeros[MOST];
    double means[MOST], m2[MOST];
} PackStrips;

/* The rows of a pack as floats, `*step` apart. */
static const float *pack_floats(const void *from, int64_t at, const Problem *p, const Pack *pack, int64_t *step, int64_t type, float *strip) {
    if (type == F32) return (const float *)from + at;
    if (*step == p->run) load(strip, from, at, pack->rows * p->run, type);
    else for (int64_t k = 0; k < pack->rows; k++) load(strip + k * p->run, from, at + k * *step, p->run, type);
    *step = p->run;
    return strip;
}

/* What is normalized. A residual is added, and the sum rounded and written. */
static Strip pack_normalized(const Problem *p, const Tensors *t, const Pack *pack, int64_t *step, PackStrips *strips) {
    int64_t n = pack->rows * p->run;
    *step = pack->step;
    if (!p->residual) return (Strip){there(t->x, pack->in_x, p->x), p->x};
    *step = p->run; /* x and residual are dense */
    load(strips->x, t->x, pack->at, n, p->x);
    add(strips->x, floats(t->residual, pack->at, n, p->residual, strips->other), n);
    store(t->sum, pack->at, strips->x, n, p->type);
    return (Strip){there(t->sum, pack->at, p->type), p->type};
}

LOOP void pack_statistics(float *restrict mean, float *restrict var, float *restrict rstd, const double *restrict means, const double *restrict m2, double n, double eps,
                          int64_t rows) {
    for (int64_t k = 0; k < rows; k++) as_statistics(mean + k, var + k, rstd + k, (Moments){n, means[k], m2[k]}, eps);
}

static void packs_task(void *job, int64_t number, void *scratch) {
    const Packs *packs = job;
    const Problem *p = packs->p;
    const Tensors *t = packs->t;
    PackStrips *strips = scratch;
    int64_t end = smaller(p->outer * p->sets, (number + 1) * packs->per_task);
    affine_start(&strips->affine);
    for (int64_t row = number * packs->per_task; row < end;) {
        Pack pack = pack_at(p, row, end);
        int64_t step, n = pack.rows * p->run;
        Strip x = pack_normalized(p, t, &pack, &step, strips);
        float *mean = t->mean + row, *rstd = t->rstd + row, *var = t->var ? t->var + row : strips->var;
        ahead(t->x, pack.in_x + pack.rows * pack.step, smaller(n, (end - row - pack.rows) * p->run), p->x, 0);
        if (t->y) ahead(t->y, pack.at, n, p->type, 1);
        if (!p->given) {
            loops_of[x.type].moments(strips->means, strips->m2, x.at, step, pack.rows, p->run, (int)p->centered, NULL);
            pack_statistics(mean, var, rstd, strips->means, strips->m2, (double)p->run, p->eps, pack.rows);
        }
        row += pack.rows;
        if (!t->y) continue;
        const Slot *slot = affine_at(&strips->affine, p, t, pack.o, 0, 0, p->run);
        int plain = !p->activation;
        const void *in = plain ? x.at : pack_floats(x.at, 0, p, &pack, &step, x.type, strips->x);
        void *out = plain || p->type == F32 ? place(t->y, pack.at, p->type) : strips->other;
        loops_of[plain ? p->type : F32].normalize(out, in, step, mean, rstd, slot->gain, slot->term, pack.rows, p->run);
        if (p->activation) activate(t->y, pack.at, out, n, p->activation, p->type);
    }
}

static int packs_forward(const Problem *p, const Tensors *t, int64_t threads) {
    Packs packs = {.p = p, .t = t, .per_task = larger(1, PART / p->run)};
    int64_t scratch = aligned(sizeof(PackStrips));
    char *memory = buffers(threads * scratch);
    if (!memory) return 1;
    each(packs_task, &packs, pieces_of(p->outer * p->sets, packs.per_task), threads, memory, scratch);
    release(memory);
    return 0;
}
