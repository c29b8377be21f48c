/* The backward of the row walk. */
#pragma once
#include "rows.h"

typedef struct {
    Affine affine;
    STRIP x[BLOCK];
    STRIP dy[BLOCK];
    STRIP dz[BLOCK];
    STRIP out[BLOCK];
    const Cells *cells;
    float *a, *b;                       /* sums over rows whose parameters are the same, from column `low` of a row to `high` */
    int64_t o, r, s, low, high, rows;
    float *kept;                        /* dz of a set, where an activation made it */
} BackStrips;

/* A block of a backward: x_hat = (x - mean)·rstd, and dz, both of a type; the gain of its elements, or of each. */
typedef struct { int64_t type; const void *x, *dz; const float *gain; float one_gain, mean, rstd; } Given;

/* Whether x, dy and dx are read and written as they are. */
static int plain(const Problem *p, const Tensors *t) { return !p->activation && !p->from_y && !t->dsum; }

static void flush_rows(const Rows *rows, BackStrips *strips) {
    if (strips->rows) {
        int64_t n = strips->high - strips->low;
        cells_add_columns(strips->cells, rows->p, rows->t, strips->o, strips->r, strips->s * rows->p->run + strips->low, n, strips->a, strips->b);
        for (int64_t i = 0; i < n; i++) strips->a[i] = strips->b[i] = 0.0f;
    }
    strips->rows = 0;
}

static int same_parameters(const Map *m, const BackStrips *strips, int64_t o, int64_t r, int64_t s) {
    return map_base(m, o, r) + s * m->c == map_base(m, strips->o, strips->r) + strips->s * m->c;
}

/* Where in the sums over rows a block belongs. */
static int64_t place_in_rows(const Rows *rows, BackStrips *strips, int64_t o, int64_t s, Block block) {
    const Problem *p = rows->p;
    int64_t t = block.j0 - s * p->run;
    int another = strips->o != o || strips->r != block.r || strips->s != s;
    if (another && (strips->rows >= OFTEN || rows->shared || !same_parameters(&p->param, strips, o, block.r, s) ||
                    !same_parameters(&p->modulation, strips, o, block.r, s)))
        flush_rows(rows, strips);
    if (!strips->rows) strips->low = strips->high = t;
    if (another || !strips->rows) strips->rows++;
    strips->o = o, strips->r = block.r, strips->s = s, strips->high = larger(strips->high, t + block.n);
    return t - strips->low;
}

/* made: dz as an earlier pass has made it, or NULL; into: where it is to stay. */
static Given rows_given(const Rows *rows, int64_t set, Block block, BackStrips *strips, const float *made, float *into) {
    const Problem *p = rows->p;
    const Tensors *t = rows->t;
    int64_t o = over(set, p->sets), at = dense(p, o, block.r, block.j0), n = block.n;
    Strip x = normalized(p, t, o, block.r, block.j0, n, 0, strips->x);
    Given g = {p->type, x.at, there(t->dy, at, p->type), NULL, 1.0f, t->mean ? t->mean[set] : 0.0f, t->rstd[set]};
    const float *term = NULL;
    float one_term = 0.0f;
    if (rows->alike) constants_at(p, t, o, block.r, block.j0, &g.one_gain, &one_term);
    else {
        const Slot *slot = affine_at(&strips->affine, p, t, o, block.r, block.j0, n);
        g.gain = slot->gain, term = slot->term;
    }
    if (plain(p, t)) return g;
    g.type = F32, g.x = as_floats(x, n, strips->x), g.dz = made ? made : floats(t->dy, at, n, p->type, strips->dy);
    if (p->from_y) {
        if (rows->alike) x_hat_from_alike(strips->out, g.x, g.one_gain, one_term, n);
        else x_hat_from(strips->out, g.x, g.gain, term, n);
        memcpy(strips->x, strips->out, (size_t)n * 4);
        g.x = strips->x, g.mean = 0.0f, g.rstd = 1.0f;
    }
    if (!p->activation || made) return g;
    if (rows->alike) through_alike(into, g.dz, g.x, g.mean, g.rstd, g.one_gain, one_term, n, p->activation);
    else through(into, g.dz, g.x, g.mean, g.rstd, g.gain, term, n, p->activation);
    g.dz = into;
    return g;
}

/* The sums of a piece of a set: (6), (7) times n, and, if they are of a block or `all` are wanted, those of parameters. */
static void rows_sums(const Rows *rows, int64_t set, int64_t piece, BackStrips *strips, double *c1, double *c2, int all) {
    const Problem *p = rows->p;
    int64_t end = smaller(rows->cut.count, (piece + 1) * rows->cut.per_piece), o = over(set, p->sets), s = rest(set, p->sets);
    float *into = strips->kept ? strips->kept : strips->dz;
    *c1 = *c2 = 0.0;
    for (int64_t number = piece * rows->cut.per_piece; number < end; number++) {
        Block block = block_at(p, &rows->cut, s, number);
        Given g = rows_given(rows, set, block, strips, NULL, into);
        if (rows->alike) {
            Pair sums = loops_of[g.type].sums_alike(g.x, g.mean, g.dz, block.n);
            double a = (double)sums.two * g.rstd;
            *c1 += (double)g.one_gain * sums.one, *c2 += g.one_gain * a; /* (41) */
            if (strips->cells) {
                int64_t param = map_index(p, &p->param, map_base(&p->param, o, block.r), block.j0);
                cells_add(strips->cells, p, rows->t, param, map_index(p, &p->modulation, map_base(&p->modulation, o, block.r), block.j0), a, sums.one);
            }
        } else {
            float one, two;
            loops_of[g.type].sums(&one, &two, g.x, 0, &g.mean, &g.rstd, g.dz, g.gain, 1, block.n);
            *c1 += one, *c2 += two;
            if (strips->cells && all) {
                int64_t place = place_in_rows(rows, strips, o, s, block);
                loops_of[g.type].products(strips->a + place, strips->b + place, g.x, 0, &g.mean, &g.rstd, g.dz, 1, block.n);
            }
        }
        if (strips->kept) into += block.n;
    }
}

/* sums: those of parameters are taken here, too. */
static void rows_dx(const Rows *rows, int64_t set, Block block, const float *made, BackStrips *strips, int sums) {
    const Problem *p = rows->p;
    const Tensors *t = rows->t;
    int64_t o = over(set, p->sets), at = dense(p, o, block.r, block.j0), n = block.n;
    Given g = rows_given(rows, set, block, strips, made, strips->dz);
    void *out = g.type == p->type ? place(t->dx, at, p->type) : strips->out;
    const Loops *loops = loops_of + g.type;
    if (sums && !rows->alike) {
        int64_t place = place_in_rows(rows, strips, o, rest(set, p->sets), block);
        loops->products(strips->a + place, strips->b + place, g.x, 0, &g.mean, &g.rstd, g.dz, 1, n);
    }
    if (p->given) g.x = nothing, g.mean = g.rstd = 0.0f; /* dx depends on no x_hat, which may be no number: (9) */
    if (rows->alike) loops->dx_alike(out, g.x, g.mean, g.dz, g.one_gain, t->c1[set], t->c2[set] * g.rstd, t->rstd[set], n);
    else loops->dx(out, g.x, 0, &g.mean, &g.rstd, t->rstd + set, g.dz, g.gain, t->c1 + set, t->c2 + set, 1, n);
    if (t->dsum) add(out, floats(t->dsum, at, n, p->type, strips->dy), n);
    if (g.type != p->type) store(t->dx, at, out, n, p->type);
}

static void set_coefficients(const Problem *p, const Tensors *t, int64_t set, double c1, double c2) {
    double count = (double)(p->reps * p->fold * p->run);
    t->c1[set] = p->given || !p->centered ? 0.0f : (float)(c1 / count);
    t->c2[set] = p->given ? 0.0f : (float)(c2 / count);
}

static void strips_start(const Rows *rows, BackStrips *strips, const Cells *cells, int64_t across) {
    affine_start(&strips->affine);
    strips->rows = 0, strips->o = strips->r = strips->s = -1;
    strips->cells = any_wanted(rows->t) ? cells : NULL;
    strips->a = (float *)(strips + 1), strips->b = strips->a + across + APART;
    strips->kept = rows->keeps ? strips->b + across + APART : NULL;
    fill(strips->a, 0.0f, 2 * (across + APART));
}

static int64_t sums_across(const Rows *rows) { return !rows->alike ? (smaller(rows->p->run, rows->cut.per_piece * rows->cut.size) + 15) / 16 * 16 : 0; }

/* A part of all sets: sums and dx of each. */
static void rows_part_task(void *job, int64_t part, void *scratch) {
    const Rows *rows = job;
    BackStrips *strips = scratch;
    strips_start(rows, strips, rows->cells + part, sums_across(rows));
    int64_t end = rows->sets * (part + 1) / rows->parts;
    int later = strips->cells && rows->t->dx; /* sums over rows are taken with dx */
    for (int64_t set = rows->sets * part / rows->parts; set < end; set++) {
        double c1 = 0.0, c2 = 0.0, one, two;
        const float *made = strips->kept;
        for (int64_t piece = 0; piece < rows->cut.pieces; piece++) {
            rows_sums(rows, set, piece, strips, &one, &two, !later);
            c1 += one, c2 += two;
        }
        set_coefficients(rows->p, rows->t, set, c1, c2);
        if (!rows->t->dx) continue;
        for (int64_t number = 0; number < rows->cut.count; number++) {
            Block block = block_at(rows->p, &rows->cut, rest(set, rows->p->sets), number);
            rows_dx(rows, set, block, made, strips, later);
            if (made) made += block.n;
        }
    }
    flush_rows(rows, strips);
}

/* Whether each piece of a shared set has parameters of its own, the same for all sets: then parts are pieces, and cells few. */
static int pieces_apart(const Rows *rows) {
    const Problem *p = rows->p;
    return !rows->alike && p->reps == 1 && p->sets == 1 && p->param.a == 0 && p->param.d && !modulated(p);
}

/* The sums of a part of the pieces of a batch. */
static void rows_sums_task(void *job, int64_t part, void *scratch) {
    const Rows *rows = job;
    BackStrips *strips = scratch;
    int64_t pieces = rows->cut.pieces, start, end;
    strips_start(rows, strips, rows->cells + part, sums_across(rows));
    if (pieces_apart(rows)) start = pieces * part / rows->parts * rows->sets, end = pieces * (part + 1) / rows->parts * rows->sets;
    else start = rows->sets * pieces * part / rows->parts, end = rows->sets * pieces * (part + 1) / rows->parts;
    for (int64_t number = start; number < end; number++) {
        int64_t set = number / pieces, piece = number % pieces;
        if (pieces_apart(rows)) set = number % rows->sets, piece = number / rows->sets;
        rows_sums(rows, rows->first + set, piece, strips, rows->c1 + set * pieces + piece, rows->c2 + set * pieces + piece, 1);
        flush_rows(rows, strips);
    }
}

static void rows_dx_task(void *job, int64_t number, void *scratch) {
    const Rows *rows = job;
    BackStrips *strips = scratch;
    int64_t set = rows->first + number / rows->cut.pieces, piece = number % rows->cut.pieces;
    int64_t end = smaller(rows->cut.count, (piece + 1) * rows->cut.per_piece);
    affine_start(&strips->affine);
    for (int64_t number = piece * rows->cut.per_piece; number < end; number++)
        rows_dx(rows, set, block_at(rows->p, &rows->cut, rest(set, rows->p->sets), number), NULL, strips, 0);
}

static Range piece_range(const Problem *p, const Blocks *cut, int64_t start, int64_t end) {
    int64_t from = start * cut->per_piece * cut->size, to = smaller(p->run, end * cut->per_piece * cut->size);
    return (Range){from / p->param.channel_run * p->param.d, ((to - 1) / p->param.channel_run - from / p->param.channel_run) * p->param.d + 1};
}

/* c1 and c2 are given if `sums` is 0, and there is dx alone to compute. */
static int rows_backward(const Problem *p, const Tensors *t, int64_t threads, int sums) {
    int64_t size = p->reps * p->run;
    Rows rows = rows_of(p, t, plain(p, t));
    int shared = !sums || rows_shared(p, 1 << 16), apart = shared && pieces_apart(&rows);
    rows.keeps = p->activation && !shared && size <= KEPT;
    int64_t all = rows.sets, batch = shared ? smaller(all, batch_of(2 * size * size_of(p->type))) : all;
    rows.parts = !sums ? 0 : apart ? smaller(PARTS, rows.cut.pieces) : smaller(parts_of(p, t), shared ? batch * rows.cut.pieces : all);
    int64_t scratch = aligned((int64_t)sizeof(BackStrips) + 4 * (2 * (sums_across(&rows) + APART) + (rows.keeps ? size : 0)));
    Cells cells[PARTS];
    int64_t bytes = 0, first[PARTS + 1];
    for (int64_t part = 0; part < rows.parts; part++) {
        int64_t start = shared ? 0 : all * part / rows.parts / p->sets, end = shared ? p->outer : (all * (part + 1) / rows.parts - 1) / p->sets + 1;
        int64_t size = cells_of(cells + part, p, t, start, end);
        if (apart) {
            cells[part].range[0] = piece_range(p, &rows.cut, rows.cut.pieces * part / rows.parts, rows.cut.pieces * (part + 1) / rows.parts);
            size = cells_size(t, cells[part].range);
        }
        first[part] = bytes, bytes += size;
    }
    int64_t coefficients = shared && sums ? batch * rows.cut.pieces : 0;
    char *memory = buffers(threads * scratch + bytes + 16 * coefficients);
    if (!memory) return 1;
    char *at = memory + threads * scratch;
    for (int64_t part = 0; part < rows.parts; part++) cells_start(cells + part, t, (double *)(at + first[part]));
    rows.cells = cells, rows.c1 = (double *)(at + bytes), rows.c2 = rows.c1 + coefficients;
    if (!shared) each(rows_part_task, &rows, rows.parts, threads, memory, scratch);
    else for (; rows.first < all; rows.first += batch) {
        rows.sets = smaller(batch, all - rows.first), rows.shared = 1;
        if (sums) each(rows_sums_task, &rows, rows.parts, threads, memory, scratch);
        for (int64_t set = 0; sums && set < rows.sets; set++) {
            double c1 = 0.0, c2 = 0.0;
            for (int64_t i = set * rows.cut.pieces; i < (set + 1) * rows.cut.pieces; i++) c1 += rows.c1[i], c2 += rows.c2[i];
            set_coefficients(p, t, rows.first + set, c1, c2);
        }
        if (t->dx) each(rows_dx_task, &rows, rows.sets * rows.cut.pieces, threads, memory, scratch);
    }
    if (sums) cells_finish(p, t, cells, rows.parts, threads);
    release(memory);
    return 0;
}
