/* The tile walk: row by row, across the sets that lie side by side; what is summed over rows is an array of columns. */
#pragma once
#include "rows.h"

enum { CACHED = 1 << 19, NARROW = 1024 }; /* bytes that stay in the second-level cache between two passes; of a row, too few to be read apart */

typedef struct {
    const Problem *p;
    const Tensors *t;
    int64_t columns, chunks;       /* of a task that has whole sets; how many such tasks a sample has */
    int64_t rows, pieces;          /* of a piece of a shared sample; how many there are */
    int64_t first, samples;        /* of a batch of shared samples */
    double *one, *two;             /* (sample, piece, column): mean and m2; in a backward the sums of wdy and wdy·x_hat */
    Cells *cells;
    int64_t parts;
    int alike;                     /* all columns of a row share their parameters */
} Tiles;

typedef struct {
    Affine affine;
    STRIP x[BLOCK];
    STRIP out[BLOCK];
    STRIP mean[BLOCK];
    STRIP rstd[BLOCK];
    STRIP factor[BLOCK];
} TileStrips;

/* mean and m2 of columns j0 to j1 of rows r0 to r1. */
static void columns_moments(const Tiles *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, double *mean, double *m2, TileStrips *strips) {
    for (int64_t i = 0; i < j1 - j0; i++) mean[i] = m2[i] = 0.0;
    for (int64_t j = j0; j < j1; j += SPAN) for (int64_t r = r0, rows; r < r1; r += rows) {
        int64_t n = smaller(SPAN, j1 - j);
        Row x[ROWS];
        rows = smaller(r == r0 ? FIRST : ROWS, r1 - r);
        for (int64_t k = 0; k < rows; k++) x[k] = normalized(tiles->p, tiles->t, o, r + k, j, n, 1, strips->x).at;
        merge_columns(mean + (j - j0), m2 + (j - j0), r - r0, x, tiles->p->type, rows, n, (int)tiles->p->centered);
    }
}

/* The columns of a set, p->reps rows each, taken together; in rows that are folded, it has them several times. */
static Moments together(const Problem *p, const double *mean, const double *m2) {
    int64_t apart = p->sets * p->run;
    double middle = 0.0, squares = 0.0, columns = (double)(p->fold * p->run);
    for (int64_t k = 0; k < p->fold; k++) for (int64_t t = k * apart; t < k * apart + p->run; t++) middle += mean[t], squares += m2[t];
    middle /= columns;
    if (p->centered && columns > 1.0)
        for (int64_t k = 0; k < p->fold; k++)
            for (int64_t t = k * apart; t < k * apart + p->run; t++) squares += (double)p->reps * (mean[t] - middle) * (mean[t] - middle);
    return (Moments){(double)p->reps * columns, middle, squares};
}

/* A statistic of the sets, for each of their columns. */
static void columns_of(float *restrict to, const float *restrict stat, const Problem *p, int64_t o, int64_t j0, int64_t n) {
    const float *of = stat + o * p->sets;
    if (p->fold > 1 && n > once(p, n)) {
        columns_of(to, stat, p, o, 0, once(p, n));
        repeat(to, once(p, n), n);
    } else if (p->run == 1) memcpy(to, of + j0, (size_t)n * 4);
    else {
        int64_t s = set_of(p, j0), within = rest(j0, p->run);
        for (int64_t i = 0; i < n; within = 0, s = s + 1 == p->sets ? 0 : s + 1) {
            float value = of[s];
            for (int64_t end = smaller(n, i + p->run - within); i < end; i++) to[i] = value;
        }
    }
}

/* Whether parameters vary from row to row; whether they are the same all along a row. */
static int by_rows(const Problem *p) { return (affine(p) && p->param.b) || (modulated(p) && p->modulation.b); }
static int row_alike(const Problem *p) { return (!affine(p) || is_constant(p, &p->param)) && (!modulated(p) || is_constant(p, &p->modulation)); }

static void tiles_apply(const Tiles *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, TileStrips *strips) {
    const Problem *p = tiles->p;
    const Tensors *t = tiles->t;
    int vary = by_rows(p);
    affine_start(&strips->affine);
    for (int64_t j = j0; j < j1; j += BLOCK) {
        int64_t n = smaller(BLOCK, j1 - j);
        const Slot *slot = NULL;
        columns_of(strips->mean, t->mean, p, o, j, n);
        columns_of(strips->rstd, t->rstd, p, o, j, n);
        for (int64_t r = r0; r < r1; r++) {
            int64_t at = dense(p, o, r, j);
            Strip x = normalized(p, t, o, r, j, n, (int)p->given, strips->x);
            Way way = way_of(p, !p->activation, x, t->y, at, n, strips->x, strips->out);
            if (r + 2 < r1) {
                ahead(t->x, in_x(p, o, r + 2, j), n, p->x, 0);
                ahead(t->y, dense(p, o, r + 2, j), n, p->type, 1);
            }
            if (tiles->alike) {
                float gain, term;
                constants_at(p, t, o, r, j, &gain, &term);
                loops_of[way.type].normalize_columns_alike(way.out, way.x, strips->mean, strips->rstd, gain, term, n);
            } else {
                if (vary || !slot) {
                    slot = affine_at(&strips->affine, p, t, o, r, j, n);
                    memcpy(strips->factor, strips->rstd, (size_t)n * 4);
                    multiply(strips->factor, slot->gain, n);
                }
                loops_of[way.type].normalize_columns(way.out, way.x, strips->mean, strips->factor, slot->term, n);
            }
            if (p->activation) activate(t->y, at, way.out, n, p->activation, p->type);
            else if (way.type != p->type) store(t->y, at, way.out, n, p->type);
        }
    }
}

/* Some whole sets of a sample: reduced and applied while they are in the cache. */
static void tiles_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    const Problem *p = tiles->p;
    TileStrips *strips = scratch;
    double *mean = (double *)(strips + 1), *m2 = mean + tiles->columns;
    int64_t o = number / tiles->chunks, j0 = number % tiles->chunks * tiles->columns, j1 = smaller(j0 + tiles->columns, width(p));
    if (!p->given) {
        columns_moments(tiles, o, 0, p->reps, j0, j1, mean, m2, strips);
        for (int64_t j = 0; j < smaller(j1 - j0, p->sets * p->run); j += p->run)
            set_statistics(p, tiles->t, o * p->sets + (j0 + j) / p->run, together(p, mean + j, m2 + j));
    }
    if (tiles->t->y) tiles_apply(tiles, o, 0, p->reps, j0, j1, strips);
}

static void tiles_reduce_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    int64_t piece = number % tiles->pieces, r0 = piece * tiles->rows, at = number * width(tiles->p);
    columns_moments(tiles, tiles->first + number / tiles->pieces, r0, smaller(r0 + tiles->rows, tiles->p->reps), 0, width(tiles->p), tiles->one + at, tiles->two + at, scratch);
}

/* The moments of a set of a shared sample: pieces of columns, then columns of sets. */
static void tiles_combine(const Tiles *tiles, int64_t o, int64_t s) {
    const Problem *p = tiles->p;
    int64_t w = width(p);
    double *one = tiles->one + o * tiles->pieces * w + s * p->run, *two = tiles->two + o * tiles->pieces * w + s * p->run;
    for (int64_t k = 0; k < p->fold; k++) for (int64_t t = k * p->sets * p->run; t < k * p->sets * p->run + p->run; t++) {
        Moments all = {0.0, 0.0, 0.0};
        for (int64_t piece = 0; piece < tiles->pieces; piece++) {
            double rows = (double)(smaller(p->reps, (piece + 1) * tiles->rows) - piece * tiles->rows);
            all = merged(all, (Moments){rows, one[piece * w + t], two[piece * w + t]}, (int)p->centered);
        }
        one[t] = all.mean, two[t] = all.m2;
    }
    set_statistics(p, tiles->t, (tiles->first + o) * p->sets + s, together(p, one, two));
}

/* Some sets at a time: a task should be worth its number. */
static int64_t combined(const Problem *p) { return larger(1, BLOCK / (p->fold * p->run)); }

static void tiles_combine_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    int64_t start = number * combined(tiles->p), end = smaller(start + combined(tiles->p), tiles->samples * tiles->p->sets);
    (void)scratch;
    for (int64_t set = start; set < end; set++) tiles_combine(tiles, set / tiles->p->sets, set % tiles->p->sets);
}

static void tiles_apply_task(void *job, int64_t number, void *scratch) {
    const Tiles *tiles = job;
    int64_t r0 = number % tiles->pieces * tiles->rows;
    tiles_apply(tiles, tiles->first + number / tiles->pieces, r0, smaller(r0 + tiles->rows, tiles->p->reps), 0, width(tiles->p), scratch);
}

/* How a tile walk is cut. Whole sets for a task, if their columns are as wide as two lines of memory and stay in a cache; otherwise samples are shared. */
static int tiles_shared(Tiles *tiles, int64_t bytes) {
    const Problem *p = tiles->p;
    int64_t w = width(p), sets = larger(1, CACHED / larger(1, p->reps * p->run * bytes));
    tiles->columns = p->fold > 1 ? w : smaller(w, smaller(sets, larger(1, 4 * BLOCK / p->run)) * p->run);
    int64_t eighth = pieces_of(w / p->run, 8) * p->run; /* if that gives enough tasks, and they are not narrow */
    if (p->fold == 1 && p->outer < 8 && eighth < tiles->columns && eighth * size_of(p->type) >= NARROW) tiles->columns = eighth;
    tiles->chunks = pieces_of(w, tiles->columns);
    tiles->rows = larger(FIRST, PIECE / w), tiles->pieces = pieces_of(p->reps, tiles->rows);
    if (tiles->columns * size_of(p->type) < NARROW && tiles->columns < w) return 1;
    return p->reps * tiles->columns * bytes > 2 * CACHED || (p->outer * tiles->chunks < 8 && p->reps * w > PIECE / 4 && tiles->pieces > 1);
}

static int tiles_forward(const Problem *p, const Tensors *t, int64_t threads) {
    Tiles tiles = {.p = p, .t = t, .alike = row_alike(p)};
    int shared = tiles_shared(&tiles, size_of(p->type));
    int64_t w = width(p), batch = shared ? smaller(p->outer, batch_of(p->reps * w * size_of(p->type))) : 0, moments = p->given ? 0 : batch * tiles.pieces * w;
    int64_t scratch = aligned((int64_t)sizeof(TileStrips) + (shared ? 0 : 16 * tiles.columns));
    char *memory = buffers(threads * scratch + 16 * moments);
    if (!memory) return 1;
    tiles.one = (double *)(memory + threads * scratch), tiles.two = tiles.one + moments;
    if (!shared) each(tiles_task, &tiles, p->outer * tiles.chunks, threads, memory, scratch);
    else for (; tiles.first < p->outer; tiles.first += batch) {
        tiles.samples = smaller(batch, p->outer - tiles.first);
        if (!p->given) {
            each(tiles_reduce_task, &tiles, tiles.samples * tiles.pieces, threads, memory, scratch);
            each(tiles_combine_task, &tiles, pieces_of(tiles.samples * p->sets, combined(p)), threads, memory, scratch);
        }
        if (t->y) each(tiles_apply_task, &tiles, tiles.samples * tiles.pieces, threads, memory, scratch);
    }
    release(memory);
    return 0;
}
