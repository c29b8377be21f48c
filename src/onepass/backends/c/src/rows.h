/* The row walk: set by set, each along its runs. */
#pragma once
#include "cells.h"
#include "moments.h"

enum { KEPT = 1 << 14 }; /* elements of a set whose dz, made by an activation, stays from the sums to dx */

/* How a set is cut: runs into atoms, whose elements share what a kernel needs them to, those into blocks, and blocks are gathered in pieces. */
typedef struct { int64_t size, atom, per_atom, per_run, count, per_piece, pieces; } Blocks;

static Blocks blocks_of(const Problem *p, int64_t atom, int64_t size) {
    int64_t per_atom = pieces_of(atom, size), per_run = p->run / atom * per_atom, count = p->reps * per_run;
    int64_t per_piece = larger(1, PIECE / smaller(atom, size));
    return (Blocks){size, atom, per_atom, per_run, count, per_piece, pieces_of(count, per_piece)};
}

typedef struct { int64_t r, j0, n; } Block;

static inline Block block_at(const Problem *p, const Blocks *cut, int64_t s, int64_t number) {
    int64_t r = over(number, cut->per_run), within = number - r * cut->per_run, atom = over(within, cut->per_atom);
    int64_t start = (within - atom * cut->per_atom) * cut->size;
    return (Block){r, s * p->run + atom * cut->atom + start, smaller(cut->size, cut->atom - start)};
}

typedef struct {
    const Problem *p;
    const Tensors *t;
    Blocks cut;
    int alike;                      /* the elements of a block share their parameters */
    int64_t first, sets, per_task;  /* the sets of this batch; of a task */
    Moments *pieces;                /* of sets that are shared */
    double *c1, *c2;                /* the same of a backward */
    Cells *cells;
    int64_t parts;
    int keeps, shared;
} Rows;

typedef struct { Affine affine; STRIP x[BLOCK]; STRIP out[BLOCK]; } RowStrips;

static void rows_moments(const Rows *rows, int64_t set, int64_t piece, RowStrips *strips, Moments *taken) {
    const Problem *p = rows->p;
    int64_t end = smaller(rows->cut.count, (piece + 1) * rows->cut.per_piece), o = over(set, p->sets), s = rest(set, p->sets);
    *taken = (Moments){0.0, 0.0, 0.0};
    for (int64_t number = piece * rows->cut.per_piece; number < end; number++) {
        Block block = block_at(p, &rows->cut, s, number);
        Strip x = normalized(p, rows->t, o, block.r, block.j0, block.n, 1, strips->x);
        *taken = merged_with(*taken, x, block.n, (int)p->centered);
    }
}

static void set_statistics(const Problem *p, const Tensors *t, int64_t set, Moments taken) {
    float var;
    as_statistics(t->mean + set, t->var ? t->var + set : &var, t->rstd + set, taken, p->eps);
}

static void rows_apply(const Rows *rows, int64_t set, int64_t number, RowStrips *strips) {
    const Problem *p = rows->p;
    const Tensors *t = rows->t;
    int64_t o = over(set, p->sets);
    Block block = block_at(p, &rows->cut, rest(set, p->sets), number);
    int64_t at = dense(p, o, block.r, block.j0), n = block.n;
    Strip x = normalized(p, t, o, block.r, block.j0, n, (int)p->given, strips->x);
    Way way = way_of(p, !p->activation, x, t->y, at, n, strips->x, strips->out);
    if (rows->alike) {
        float gain, term;
        constants_at(p, t, o, block.r, block.j0, &gain, &term);
        loops_of[way.type].normalize_alike(way.out, way.x, t->mean[set], t->rstd[set] * gain, term, n);
    } else {
        const Slot *slot = affine_at(&strips->affine, p, t, o, block.r, block.j0, n);
        loops_of[way.type].normalize(way.out, way.x, 0, t->mean + set, t->rstd + set, slot->gain, slot->term, 1, n);
    }
    if (p->activation) activate(t->y, at, way.out, n, p->activation, p->type);
    else if (way.type != p->type) store(t->y, at, way.out, n, p->type);
}

/* Whole sets: reduced and applied while they are in the cache. */
static void rows_task(void *job, int64_t number, void *scratch) {
    const Rows *rows = job;
    RowStrips *strips = scratch;
    int64_t end = smaller(rows->sets, (number + 1) * rows->per_task);
    affine_start(&strips->affine);
    for (int64_t set = number * rows->per_task; set < end; set++) {
        Moments all = {0.0, 0.0, 0.0}, taken;
        for (int64_t piece = 0; piece < rows->cut.pieces; piece++) {
            rows_moments(rows, set, piece, strips, &taken);
            all = merged(all, taken, (int)rows->p->centered);
        }
        set_statistics(rows->p, rows->t, set, all);
        if (!rows->t->y) continue;
        for (int64_t block = 0; block < rows->cut.count; block++) rows_apply(rows, set, block, strips);
    }
}

/* Runs in the order of memory, where the statistics are given. */
static void rows_given_task(void *job, int64_t number, void *scratch) {
    const Rows *rows = job;
    const Problem *p = rows->p;
    RowStrips *strips = scratch;
    int64_t end = smaller(p->outer * p->reps * p->sets, (number + 1) * rows->per_task);
    affine_start(&strips->affine);
    for (int64_t run = number * rows->per_task; run < end; run++) {
        int64_t row = over(run, p->sets), o = over(row, p->reps), r = row - o * p->reps, set = o * p->sets + run - row * p->sets;
        for (int64_t block = r * rows->cut.per_run; block < (r + 1) * rows->cut.per_run; block++) rows_apply(rows, set, block, strips);
    }
}

static void rows_reduce_task(void *job, int64_t number, void *scratch) {
    const Rows *rows = job;
    rows_moments(rows, rows->first + number / rows->cut.pieces, number % rows->cut.pieces, scratch, rows->pieces + number);
}

static void rows_apply_task(void *job, int64_t number, void *scratch) {
    const Rows *rows = job;
    RowStrips *strips = scratch;
    int64_t set = rows->first + number / rows->cut.pieces, piece = number % rows->cut.pieces;
    int64_t end = smaller(rows->cut.count, (piece + 1) * rows->cut.per_piece);
    affine_start(&strips->affine);
    for (int64_t block = piece * rows->cut.per_piece; block < end; block++) rows_apply(rows, set, block, strips);
}

/* Sets that are too large for a cache, or too few for the threads, are shared; so many at once that what was read is in a cache, still. */
static int rows_shared(const Problem *p, int64_t most) {
    int64_t size = p->reps * p->run, sets = p->outer * p->sets;
    return size > most || (sets < 8 && size > PIECE / 4);
}

/* `plain`: nothing passes through strips, so blocks can be longer than those. */
static Rows rows_of(const Problem *p, const Tensors *t, int plain) {
    int64_t atom = atom_of(p);
    int alike = atom >= 64 || atom == p->run;
    return (Rows){.p = p, .t = t, .cut = blocks_of(p, alike ? atom : p->run, alike && plain ? 4 * BLOCK : BLOCK), .alike = alike, .sets = p->outer * p->sets};
}

static int64_t batch_of(int64_t bytes) { return larger(1, (4 << 20) / larger(1, bytes)); }

static int rows_forward(const Problem *p, const Tensors *t, int64_t threads) {
    Rows rows = rows_of(p, t, !p->activation && !p->residual);
    int64_t size = p->reps * p->run, scratch = aligned(sizeof(RowStrips));
    int shared = !p->given && rows_shared(p, 1 << 17);
    int64_t batch = shared ? smaller(rows.sets, batch_of(size * size_of(p->type))) : 0;
    char *memory = buffers(threads * scratch + batch * rows.cut.pieces * (int64_t)sizeof(Moments));
    if (!memory) return 1;
    rows.pieces = (Moments *)(memory + threads * scratch);
    if (p->given) {
        rows.per_task = larger(1, PART / p->run);
        each(rows_given_task, &rows, pieces_of(rows.sets * p->reps, rows.per_task), threads, memory, scratch);
    } else if (!shared) {
        rows.per_task = larger(1, PART / size);
        each(rows_task, &rows, pieces_of(rows.sets, rows.per_task), threads, memory, scratch);
    } else for (; rows.first < rows.sets; rows.first += batch) {
        int64_t sets = smaller(batch, rows.sets - rows.first);
        each(rows_reduce_task, &rows, sets * rows.cut.pieces, threads, memory, scratch);
        for (int64_t set = 0; set < sets; set++) {
            Moments all = {0.0, 0.0, 0.0};
            for (int64_t piece = 0; piece < rows.cut.pieces; piece++) all = merged(all, rows.pieces[set * rows.cut.pieces + piece], (int)p->centered);
            set_statistics(p, t, rows.first + set, all);
        }
        if (t->y) each(rows_apply_task, &rows, sets * rows.cut.pieces, threads, memory, scratch);
    }
    release(memory);
    return 0;
}
