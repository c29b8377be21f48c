/* The backward of packs of short rows. */
#pragma once
#include "packs.h"
#include "rows_backward.h"

/* c1 and c2 of each row, (6), (7). */
LOOP void pack_sums(float *restrict c1, float *restrict c2, const float *restrict all, int64_t step, const float *restrict means, const float *restrict rstd,
                    const float *restrict all_dz, const float *restrict gain, int64_t rows, int64_t n) {
    float each = 1.0f / (float)n;
    for (int64_t k = 0; k < rows; k++) {
        const float *restrict x = all + k * step, *restrict dz = all_dz + k * n;
        Pair sums = sums_weighted(x, means[k], 1.0f, dz, gain, n);
        c1[k] = sums.one * each, c2[k] = sums.two * rstd[k] * each;
    }
}

LOOP void pack_products(float *restrict a, float *restrict b, const float *restrict all, int64_t step, const float *restrict mean, const float *restrict rstd,
                        const float *restrict all_dz, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const float *restrict x = all + k * step, *restrict dz = all_dz + k * n;
        float m = mean[k], r = rstd[k];
        for (int64_t i = 0; i < n; i++) a[i] += dz[i] * ((x[i] - m) * r), b[i] += dz[i];
    }
}

/* (8); `scale` is rstd, also where x_hat was taken from y, whose mean is then 0 and rstd 1. */
LOOP void pack_dx(float *restrict dx, const float *restrict all, int64_t step, const float *restrict mean, const float *restrict rstd, const float *restrict scale,
                  const float *restrict all_dz, const float *restrict gain, const float *restrict c1, const float *restrict c2, int64_t rows, int64_t n) {
    for (int64_t k = 0; k < rows; k++) {
        const float *restrict x = all + k * step, *restrict dz = all_dz + k * n;
        float *restrict out = dx + k * n, m = mean[k], r = scale[k], one = c1[k], two = c2[k] * rstd[k];
        for (int64_t i = 0; i < n; i++) out[i] = (gain[i] * dz[i] - one - (x[i] - m) * two) * r;
    }
}

/* What is known of the rows that went into the sums a and b, so far. */
typedef struct { int64_t o, rows; } Summed;

static void packs_flush(const Packs *packs, const Cells *cells, PackStrips *strips, Summed *summed) {
    if (summed->rows) {
        cells_add_columns(cells, packs->p, packs->t, summed->o, 0, 0, packs->p->run, strips->a, strips->b);
        fill(strips->a, 0.0f, packs->p->run), fill(strips->b, 0.0f, packs->p->run);
    }
    summed->rows = 0;
}

static int same_sample(const Map *m, int64_t o, int64_t other) { return map_base(m, o, 0) == map_base(m, other, 0); }

static void packs_part_task(void *job, int64_t part, void *scratch) {
    const Packs *packs = job;
    const Problem *p = packs->p;
    const Tensors *t = packs->t;
    PackStrips *strips = scratch;
    const Cells *cells = packs->sums && any_wanted(t) ? packs->cells + part : NULL;
    Summed summed = {0, 0};
    int64_t all = p->outer * p->sets, end = all * (part + 1) / packs->parts;
    affine_start(&strips->affine);
    fill(strips->a, 0.0f, p->run), fill(strips->b, 0.0f, p->run);
    for (int64_t row = all * part / packs->parts; row < end;) {
        Pack pack = pack_at(p, row, end);
        int64_t n = pack.rows * p->run, step = pack.step;
        const float *x = pack_floats(t->x, pack.in_x, p, &pack, &step, p->x, strips->x), *mean = t->mean ? t->mean + row : strips->mean, *rstd = t->rstd + row;
        const float *scale = rstd, *dz = floats(t->dy, pack.at, n, p->type, strips->dy);
        const Slot *slot = affine_at(&strips->affine, p, t, pack.o, 0, 0, p->run);
        if (!t->mean || p->from_y) fill(strips->mean, 0.0f, pack.rows), mean = strips->mean;
        if (p->from_y) {
            for (int64_t k = 0; k < pack.rows; k++) x_hat_from(strips->other + k * p->run, x + k * step, slot->gain, slot->term, p->run);
            fill(strips->rstd, 1.0f, pack.rows), rstd = strips->rstd;
            x = strips->other, step = p->run;
        }
        if (p->activation) {
            for (int64_t k = 0; k < pack.rows; k++)
                through(strips->dz + k * p->run, dz + k * p->run, x + k * step, mean[k], rstd[k], slot->gain, slot->term, p->run, p->activation);
            dz = strips->dz;
        }
        float *c1 = t->c1 + row, *c2 = t->c2 + row;
        if (packs->sums) {
            pack_sums(c1, c2, x, step, mean, rstd, dz, slot->gain, pack.rows, p->run);
            if (p->given || !p->centered) fill(c1, 0.0f, pack.rows);
            if (p->given) fill(c2, 0.0f, pack.rows);
        }
        if (cells) {
            if (summed.rows >= OFTEN || (summed.rows && (!same_sample(&p->param, pack.o, summed.o) || !same_sample(&p->modulation, pack.o, summed.o))))
                packs_flush(packs, cells, strips, &summed);
            pack_products(strips->a, strips->b, x, step, mean, rstd, dz, pack.rows, p->run);
            summed.o = pack.o, summed.rows += pack.rows;
        }
        if (t->dx) {
            float *out = p->type == F32 ? (float *)t->dx + pack.at : x == strips->x ? strips->other : strips->x;
            pack_dx(out, x, step, mean, rstd, scale, dz, slot->gain, c1, c2, pack.rows, p->run);
            if (t->dsum) add(out, floats(t->dsum, pack.at, n, p->type, dz == strips->dz ? strips->dy : strips->dz), n);
            if (p->type != F32) store(t->dx, pack.at, out, n, p->type);
        }
        row += pack.rows;
    }
    if (cells) packs_flush(packs, cells, strips, &summed);
}

static int packs_backward(const Problem *p, const Tensors *t, int64_t threads, int sums) {
    int64_t all = p->outer * p->sets, scratch = aligned(sizeof(PackStrips)), bytes = 0, first[PARTS];
    Packs packs = {.p = p, .t = t, .sums = sums, .parts = smaller(all, parts_of(p, t))};
    Cells cells[PARTS];
    for (int64_t part = 0; part < packs.parts; part++) {
        first[part] = bytes;
        bytes += cells_of(cells + part, p, t, all * part / packs.parts / p->sets, (all * (part + 1) / packs.parts - 1) / p->sets + 1);
    }
    char *memory = malloc((size_t)(threads * scratch + bytes));
    if (!memory) return 1;
    for (int64_t part = 0; part < packs.parts; part++) cells_start(cells + part, t, (double *)(memory + threads * scratch + first[part]));
    packs.cells = cells;
    each(packs_part_task, &packs, packs.parts, threads, memory, scratch);
    if (sums) cells_finish(p, t, cells, packs.parts, threads);
    free(memory);
    return 0;
}
