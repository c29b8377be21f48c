/* The backward of the tile walk. */
#pragma once
#include "rows_backward.h"
#include "tiles.h"

typedef struct {
    Affine affine;
    STRIP x[BLOCK];
    STRIP dy[BLOCK];
    STRIP dz[BLOCK];
    STRIP out[BLOCK];
    STRIP mean[BLOCK];
    STRIP rstd[BLOCK];
    STRIP a[BLOCK + APART];
    STRIP b[BLOCK + APART];
    STRIP zeros[BLOCK];
    STRIP ones[BLOCK];
    STRIP c1[BLOCK];
    STRIP c2[BLOCK];
    STRIP of_dz[BLOCK];
    STRIP of_x[BLOCK];
    STRIP constant[BLOCK];
} TileBackStrips;

/* A row of a backward: x_hat = (x - mean)·rstd, and dz. */
typedef struct { int64_t type; const void *x, *dz; const float *gain, *mean, *rstd; float one_gain; } GivenRow; /* one_gain: of all columns, where `alike` */

static void tile_start(const Tiles *tiles, int64_t o, int64_t j, int64_t n, TileBackStrips *strips) {
    affine_start(&strips->affine);
    fill(strips->zeros, 0.0f, n), fill(strips->ones, 1.0f, n);
    if (tiles->t->mean) columns_of(strips->mean, tiles->t->mean, tiles->p, o, j, n);
    else fill(strips->mean, 0.0f, n);
    columns_of(strips->rstd, tiles->t->rstd, tiles->p, o, j, n);
}

static GivenRow tile_given(const Tiles *tiles, int64_t o, int64_t r, int64_t j, int64_t n, TileBackStrips *strips) {
    const Problem *p = tiles->p;
    const Tensors *t = tiles->t;
    int64_t at = dense(p, o, r, j);
    Strip x = normalized(p, t, o, r, j, n, 0, strips->x);
    GivenRow g = {p->type, x.at, there(t->dy, at, p->type), NULL, strips->mean, strips->rstd, 0.0f};
    if (tiles->alike) {
        float term;
        constants_at(p, t, o, r, j, &g.one_gain, &term);
        if (plain(p, t)) return g;
    }
    const Slot *slot = affine_at(&strips->affine, p, t, o, r, j, n);
    g.gain = slot->gain;
    if (plain(p, t)) return g;
    g.type = F32, g.x = as_floats(x, n, strips->x), g.dz = floats(t->dy, at, n, p->type, strips->dy);
    if (p->from_y) {
        x_hat_from(strips->out, g.x, slot->gain, slot->term, n);
        memcpy(strips->x, strips->out, (size_t)n * 4);
        g.x = strips->x, g.mean = strips->zeros, g.rstd = strips->ones;
    }
    if (p->activation) {
        through_columns(strips->dz, g.dz, g.x, g.mean, g.rstd, g.gain, slot->term, n, p->activation);
        g.dz = strips->dz;
    }
    return g;
}

LOOP void add_weighted_wide(double *restrict sum, const float *restrict gain, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += (double)gain[i] * x[i];
}

/* The sums over rows r0 to r1 of wdy and wdy·x_hat, column by column, and those of parameters. */
static void columns_sums(const Tiles *tiles, const Cells *cells, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, double *one, double *two, TileBackStrips *strips) {
    const Problem *p = tiles->p;
    int vary = by_rows(p) || tiles->alike;
    for (int64_t i = 0; i < j1 - j0; i++) one[i] = two[i] = 0.0;
    for (int64_t j = j0; j < j1; j += BLOCK, one += BLOCK, two += BLOCK) {
        int64_t n = smaller(BLOCK, j1 - j);
        tile_start(tiles, o, j, n, strips);
        fill(strips->a, 0.0f, n), fill(strips->b, 0.0f, n);
        for (int64_t r = r0; r < r1; r++) {
            GivenRow g = tile_given(tiles, o, r, j, n, strips);
            const Loops *loops = loops_of + g.type;
            if (!vary) loops->add_columns(strips->a, strips->b, g.x, g.dz, g.mean, g.rstd, n);
            else if (tiles->alike) loops->add_columns_alike(strips->a, strips->b, g.x, g.dz, g.mean, g.rstd, g.one_gain, n);
            else loops->add_columns_weighted(strips->a, strips->b, g.x, g.dz, g.mean, g.rstd, g.gain, n);
            if (cells && tiles->alike) {
                Pair sums = loops->sums_row(g.x, g.dz, g.mean, g.rstd, n);
                cells_add(cells, p, tiles->t, map_base(&p->param, o, r), map_base(&p->modulation, o, r), sums.two, sums.one);
            } else if (cells && vary) {
                loops->products_row(strips->of_x, strips->of_dz, g.x, g.dz, g.mean, g.rstd, n);
                cells_add_columns(cells, p, tiles->t, o, r, j, n, strips->of_x, strips->of_dz);
            }
            if ((r - r0) % OFTEN == OFTEN - 1 || r == r1 - 1) {
                if (cells && !vary) cells_add_columns(cells, p, tiles->t, o, r, j, n, strips->a, strips->b);
                add_weighted_wide(one, vary ? strips->ones : g.gain, strips->b, n); /* (41) */
                add_weighted_wide(two, vary ? strips->ones : g.gain, strips->a, n);
                fill(strips->a, 0.0f, n), fill(strips->b, 0.0f, n);
            }
        }
    }
}

/* (8) as of_dz·dz + of_x·(x - mean) + constant, column by column; where `alike`, of_dz is rstd·gain. */
LOOP void dx_coefficients(TileBackStrips *restrict strips, const float *restrict x_rstd, int64_t n) {
    const float *restrict rstd = strips->rstd, *restrict c1 = strips->c1, *restrict c2 = strips->c2;
    float *restrict of_x = strips->of_x, *restrict constant = strips->constant;
    for (int64_t i = 0; i < n; i++) of_x[i] = -c2[i] * rstd[i] * x_rstd[i], constant[i] = -c1[i] * rstd[i];
}

static void tiles_dx(const Tiles *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, TileBackStrips *strips) {
    const Problem *p = tiles->p;
    const Tensors *t = tiles->t;
    int vary = by_rows(p);
    for (int64_t j = j0; j < j1; j += BLOCK) {
        int64_t n = smaller(BLOCK, j1 - j);
        tile_start(tiles, o, j, n, strips);
        columns_of(strips->c1, t->c1, p, o, j, n);
        columns_of(strips->c2, t->c2, p, o, j, n);
        for (int64_t r = r0; r < r1; r++) {
            GivenRow g = tile_given(tiles, o, r, j, n, strips);
            int64_t at = dense(p, o, r, j);
            void *out = g.type == p->type ? place(t->dx, at, p->type) : strips->out;
            if (r == r0 && p->given) fill(strips->of_x, 0.0f, n), fill(strips->constant, 0.0f, n);
            else if (r == r0) dx_coefficients(strips, g.rstd, n);
            if (p->given) g.x = nothing, g.mean = strips->zeros; /* dx depends on no x_hat, which may be no number: (9) */
            if (tiles->alike) loops_of[g.type].dx_columns_alike(out, g.x, g.dz, g.mean, strips->rstd, g.one_gain, strips->of_x, strips->constant, n);
            else {
                if (vary || r == r0) {
                    memcpy(strips->of_dz, strips->rstd, (size_t)n * 4);
                    multiply(strips->of_dz, g.gain, n);
                }
                loops_of[g.type].dx_columns(out, g.x, g.dz, g.mean, strips->of_dz, strips->of_x, strips->constant, n);
            }
            if (t->dsum) add(out, floats(t->dsum, at, n, p->type, strips->dy), n);
            if (g.type != p->type) store(t->dx, at, out, n, p->type);
        }
    }
}

static void columns_coefficients(const Tiles *tiles, int64_t set, const double *one, const double *two) {
    double c1 = 0.0, c2 = 0.0;
    int64_t apart = tiles->p->sets * tiles->p->run;
    for (int64_t k = 0; k < tiles->p->fold; k++) for (int64_t t = k * apart; t < k * apart + tiles->p->run; t++) c1 += one[t], c2 += two[t];
    set_coefficients(tiles->p, tiles->t, set, c1, c2);
}

/* A part of the tasks that have whole sets. */
static void tiles_part_task(void *job, int64_t part, void *scratch) {
    const Tiles *tiles = job;
    const Problem *p = tiles->p;
    TileBackStrips *strips = scratch;
    double *one = (double *)(strips + 1), *two = one + tiles->columns;
    int64_t all = p->outer * tiles->chunks, end = all * (part + 1) / tiles->parts;
    for (int64_t number = all * part / tiles->parts; number < end; number++) {
        int64_t o = number / tiles->chunks, j0 = number % tiles->chunks * tiles->columns, j1 = smaller(j0 + tiles->columns, width(p));
        columns_sums(tiles, any_wanted(tiles->t) ? tiles->cells + part : NULL, o, 0, p->reps, j0, j1, one, two, strips);
        for (int64_t j = 0; j < smaller(j1 - j0, p->sets * p->run); j += p->run) columns_coefficients(tiles, o * p->sets + (j0 + j) / p->run, one + j, two + j);
        if (tiles->t->dx) tiles_dx(tiles, o, 0, p->reps, j0, j1, strips);
    }
}

static void tiles_dx_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    int64_t r0 = number % tiles->pieces * tiles->rows;
    tiles_dx(tiles, tiles->first + number / tiles->pieces, r0, smaller(r0 + tiles->rows, tiles->p->reps), 0, width(tiles->p), scratch);
}

/* The sums of a part of the pieces of a batch of samples; where statistics are given, dx depends on none of them, and follows at once. */
static void tiles_sums_task(void *job, int64_t part, void *scratch) {
    const Tiles *tiles = job;
    int64_t w = width(tiles->p), all = tiles->samples * tiles->pieces, end = all * (part + 1) / tiles->parts;
    for (int64_t number = all * part / tiles->parts; number < end; number++) {
        int64_t r0 = number % tiles->pieces * tiles->rows;
        columns_sums(tiles, any_wanted(tiles->t) ? tiles->cells + part : NULL, tiles->first + number / tiles->pieces, r0,
                     smaller(r0 + tiles->rows, tiles->p->reps), 0, w, tiles->one + number * w, tiles->two + number * w, scratch);
        if (tiles->p->given && tiles->t->dx) tiles_dx_task(job, number, scratch);
    }
}

static void tiles_coefficients(const Tiles *tiles, int64_t o, int64_t s) {
    int64_t w = width(tiles->p), run = tiles->p->run;
    double *one = tiles->one + o * tiles->pieces * w + s * run, *two = tiles->two + o * tiles->pieces * w + s * run;
    for (int64_t piece = 1; piece < tiles->pieces; piece++)
        for (int64_t k = 0; k < tiles->p->fold; k++)
            for (int64_t t = k * tiles->p->sets * run; t < k * tiles->p->sets * run + run; t++) one[t] += one[piece * w + t], two[t] += two[piece * w + t];
    columns_coefficients(tiles, (tiles->first + o) * tiles->p->sets + s, one, two);
}

static void tiles_coefficients_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    int64_t start = number * combined(tiles->p), end = smaller(start + combined(tiles->p), tiles->samples * tiles->p->sets);
    (void)scratch;
    for (int64_t set = start; set < end; set++) tiles_coefficients(tiles, set / tiles->p->sets, set % tiles->p->sets);
}

/* c1 and c2 are given if `sums` is 0, and there is dx alone to compute. */
static int tiles_backward(const Problem *p, const Tensors *t, int64_t threads, int sums) {
    Tiles tiles = {.p = p, .t = t, .alike = row_alike(p)};
    int shared = tiles_shared(&tiles, 2 * size_of(p->type)) || !sums;
    int64_t w = width(p), batch = shared ? smaller(p->outer, batch_of(2 * p->reps * w * size_of(p->type))) : p->outer;
    int64_t columns = shared && sums ? batch * tiles.pieces * w : 0, all = shared ? batch * tiles.pieces : p->outer * tiles.chunks;
    int64_t scratch = aligned((int64_t)sizeof(TileBackStrips) + (shared ? 0 : 16 * tiles.columns));
    tiles.parts = sums ? smaller(parts_of(p, t), all) : 0;
    Cells cells[PARTS];
    int64_t bytes = 0, first[PARTS];
    for (int64_t part = 0; part < tiles.parts; part++) {
        int64_t start = shared ? 0 : all * part / tiles.parts / tiles.chunks, end = shared ? p->outer : (all * (part + 1) / tiles.parts - 1) / tiles.chunks + 1;
        first[part] = bytes, bytes += cells_of(cells + part, p, t, start, end);
    }
    char *memory = buffers(threads * scratch + bytes + 16 * columns);
    if (!memory) return 1;
    char *at = memory + threads * scratch;
    for (int64_t part = 0; part < tiles.parts; part++) cells_start(cells + part, t, (double *)(at + first[part]));
    tiles.cells = cells, tiles.one = (double *)(at + bytes), tiles.two = tiles.one + columns;
    if (!shared) each(tiles_part_task, &tiles, tiles.parts, threads, memory, scratch);
    else for (; tiles.first < p->outer; tiles.first += batch) {
        tiles.samples = smaller(batch, p->outer - tiles.first);
        if (sums) {
            each(tiles_sums_task, &tiles, tiles.parts, threads, memory, scratch);
            if (!p->given) each(tiles_coefficients_task, &tiles, pieces_of(tiles.samples * p->sets, combined(p)), threads, memory, scratch);
        }
        if (t->dx && !(sums && p->given)) each(tiles_dx_task, &tiles, tiles.samples * tiles.pieces, threads, memory, scratch);
    }
    if (sums) cells_finish(p, t, cells, tiles.parts, threads);
    release(memory);
    return 0;
}
