/* The backward of packs of short rows. */
#pragma once
#include "packs.h"
#include "rows_backward.h"

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
        int64_t n = pack.rows * p->run, step = pack.step, type = plain(p, t) ? p->type : F32;
        const Slot *slot = affine_at(&strips->affine, p, t, pack.o, 0, 0, p->run);
        const void *x = there(t->x, pack.in_x, p->type), *dz = there(t->dy, pack.at, p->type);
        const float *mean = t->mean ? t->mean + row : strips->mean, *rstd = t->rstd + row;
        float *c1 = t->c1 + row, *c2 = t->c2 + row;
        if (!t->mean || p->from_y) fill(strips->mean, 0.0f, pack.rows), mean = strips->mean;
        if (type != p->type) x = pack_floats(x, 0, p, &pack, &step, p->type, strips->x), dz = floats(dz, 0, n, p->type, strips->dy);
        if (p->from_y) {
            for (int64_t k = 0; k < pack.rows; k++) x_hat_from(strips->other + k * p->run, (const float *)x + k * step, slot->gain, slot->term, p->run);
            fill(strips->rstd, 1.0f, pack.rows), rstd = strips->rstd;
            x = strips->other, step = p->run;
        }
        if (p->activation) {
            for (int64_t k = 0; k < pack.rows; k++)
                through(strips->dz + k * p->run, (const float *)dz + k * p->run, (const float *)x + k * step, mean[k], rstd[k], slot->gain, slot->term, p->run, p->activation);
            dz = strips->dz;
        }
        if (packs->sums) {
            loops_of[type].sums(c1, c2, x, step, mean, rstd, dz, slot->gain, pack.rows, p->run);
            if (p->given || !p->centered) fill(c1, 0.0f, pack.rows); /* not times 0, which leaves what is no number */
            else times(c1, 1.0f / (float)p->run, pack.rows);
            if (p->given) fill(c2, 0.0f, pack.rows);
            else times(c2, 1.0f / (float)p->run, pack.rows);
        }
        if (cells) {
            if (summed.rows >= OFTEN || (summed.rows && (!same_sample(&p->param, pack.o, summed.o) || !same_sample(&p->modulation, pack.o, summed.o))))
                packs_flush(packs, cells, strips, &summed);
            summed.o = pack.o, summed.rows += pack.rows;
        }
        void *out = type == p->type ? place(t->dx, pack.at, type) : x == strips->x ? strips->other : strips->x;
        int64_t block = pack.rows == 1 ? BLOCK : p->run; /* a long row in blocks: what one pass has read is there for the next */
        if (p->given) fill(strips->zeros, 0.0f, pack.rows);
        for (int64_t i = 0; i < p->run; i += block) {
            int64_t m = smaller(block, p->run - i);
            const void *x_block = there(x, i, type), *dz_block = there(dz, i, type);
            void *to = place(out, i, type);
            const float *gain = slot->gain + i, *scales = t->rstd + row;
            if (cells) loops_of[type].products(strips->a + i, strips->b + i, x_block, step, mean, rstd, dz_block, pack.rows, m);
            if (!t->dx) continue;
            if (p->given) loops_of[type].dx(to, nothing, 0, strips->zeros, strips->zeros, scales, dz_block, gain, c1, c2, pack.rows, m); /* (9) */
            else loops_of[type].dx(to, x_block, step, mean, rstd, scales, dz_block, gain, c1, c2, pack.rows, m);
        }
        if (t->dx && t->dsum) add(out, floats(t->dsum, pack.at, n, p->type, dz == strips->dz ? strips->dy : strips->dz), n);
        if (t->dx && type != p->type) store(t->dx, pack.at, out, n, p->type);
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
    char *memory = buffers(threads * scratch + bytes);
    if (!memory) return 1;
    for (int64_t part = 0; part < packs.parts; part++) cells_start(cells + part, t, (double *)(memory + threads * scratch + first[part]));
    packs.cells = cells;
    each(packs_part_task, &packs, packs.parts, threads, memory, scratch);
    if (sums) cells_finish(p, t, cells, packs.parts, threads);
    release(memory);
    return 0;
}
