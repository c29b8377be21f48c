/* The row walk, backward: first c1 and c2 of a set and the sums of parameter gradients, then dx. */
#pragma once
#include "rows.h"

typedef struct {
    AffineCache affine;
    ALIGNED_FLOAT x[BLOCK];
    ALIGNED_FLOAT dy[BLOCK];
    ALIGNED_FLOAT dz[BLOCK];
    ALIGNED_FLOAT out[BLOCK];
    const Partials *partials;
    float *a, *b;              /* row sums: over rows with the same parameters, for columns low to high of a run */
    int64_t o, r, s;           /* the last row that they contain */
    int64_t low, high, rows;
    float *kept_dz;            /* dz of a set, or NULL */
} RowBackwardBuffers;

/* The inputs of a block: x and dz, of one type, with x_hat = (x - mean)·rstd. The gain is an array, or uniform_gain. */
typedef struct { int64_t type; const void *x, *dz; const float *gain; float uniform_gain, mean, rstd; } BackwardBlock;

/* Whether the loops can use x, dy and dx in place, without a conversion to floats. */
static int is_direct(const Problem *problem, const Tensors *tensors) { return !problem->activation && !problem->from_y && !tensors->dsum; }

/* Add the row sums to the partial sums, and start again from 0. */
static void flush_row_sums(const RowJob *rows, RowBackwardBuffers *buffers) {
    if (buffers->rows) {
        int64_t n = buffers->high - buffers->low;
        partials_add_columns(buffers->partials, rows->problem, rows->tensors, buffers->o, buffers->r,
                             buffers->s * rows->problem->run + buffers->low, n, buffers->a, buffers->b);
        for (int64_t i = 0; i < n; i++) buffers->a[i] = buffers->b[i] = 0.0f;
    }
    buffers->rows = 0;
}

static int same_parameters(const ParamMap *map, const RowBackwardBuffers *buffers, int64_t o, int64_t r, int64_t s) {
    return map_base(map, o, r) + s * map->c == map_base(map, buffers->o, buffers->r) + buffers->s * map->c;
}

/* Where in the row sums a block belongs. Flushes them first if the block's row cannot join them. */
static int64_t row_sums_offset(const RowJob *rows, RowBackwardBuffers *buffers, int64_t o, int64_t s, Block block) {
    const Problem *problem = rows->problem;
    int64_t column = block.j0 - s * problem->run;
    int new_row = buffers->o != o || buffers->r != block.r || buffers->s != s;
    if (new_row && (buffers->rows >= ROWS_PER_FLUSH || rows->shared || !same_parameters(&problem->param_map, buffers, o, block.r, s) ||
                    !same_parameters(&problem->modulation_map, buffers, o, block.r, s)))
        flush_row_sums(rows, buffers);
    if (!buffers->rows) buffers->low = buffers->high = column;
    if (new_row || !buffers->rows) buffers->rows++;
    buffers->o = o, buffers->r = block.r, buffers->s = s, buffers->high = max(buffers->high, column + block.n);
    return column - buffers->low;
}

/* `kept_dz` is dz from an earlier pass, or NULL. A new dz goes to `dz_out`. */
static BackwardBlock rows_backward_block(const RowJob *rows, int64_t set, Block block, RowBackwardBuffers *buffers, const float *kept_dz,
                                         float *dz_out) {
    const Problem *problem = rows->problem;
    const Tensors *tensors = rows->tensors;
    int64_t o = fast_div(set, problem->sets), index = dense_index(problem, o, block.r, block.j0), n = block.n;
    TypedArray x = norm_input(problem, tensors, o, block.r, block.j0, n, 0, buffers->x);
    BackwardBlock in = {problem->type, x.data, element_at(tensors->dy, index, problem->type), NULL, 1.0f,
                        tensors->mean ? tensors->mean[set] : 0.0f, tensors->rstd[set]};
    const float *term = NULL;
    float uniform_term = 0.0f;
    if (rows->uniform) uniform_affine(problem, tensors, o, block.r, block.j0, &in.uniform_gain, &uniform_term);
    else {
        const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, o, block.r, block.j0, n);
        in.gain = slot->gain, term = slot->term;
    }
    if (is_direct(problem, tensors)) return in;
    in.type = F32, in.x = array_as_floats(x, n, buffers->x);
    in.dz = kept_dz ? kept_dz : floats_at(tensors->dy, index, n, problem->type, buffers->dy);
    if (problem->from_y) {
        if (rows->uniform) x_hat_from_y_uniform(buffers->out, in.x, in.uniform_gain, uniform_term, n);
        else x_hat_from_y(buffers->out, in.x, in.gain, term, n);
        memcpy(buffers->x, buffers->out, (size_t)n * 4);
        in.x = buffers->x, in.mean = 0.0f, in.rstd = 1.0f;
    }
    if (!problem->activation || kept_dz) return in;
    if (rows->uniform) activation_backward_uniform(dz_out, in.dz, in.x, in.mean, in.rstd, in.uniform_gain, uniform_term, n,
                                                   problem->activation);
    else activation_backward(dz_out, in.dz, in.x, in.mean, in.rstd, in.gain, term, n, problem->activation);
    in.dz = dz_out;
    return in;
}

/* n·c1 and n·c2, (6) and (7), of a piece of a set. Uniform blocks also add to the partial sums.
   Other blocks add to the row sums, if `with_row_sums`. */
static void rows_piece_sums(const RowJob *rows, int64_t set, int64_t piece, RowBackwardBuffers *buffers, double *c1, double *c2,
                            int with_row_sums) {
    const Problem *problem = rows->problem;
    int64_t end = min(rows->cut.blocks, (piece + 1) * rows->cut.blocks_per_piece), o = fast_div(set, problem->sets);
    int64_t s = fast_mod(set, problem->sets);
    float *dz_out = buffers->kept_dz ? buffers->kept_dz : buffers->dz;
    *c1 = *c2 = 0.0;
    for (int64_t number = piece * rows->cut.blocks_per_piece; number < end; number++) {
        Block block = block_at(problem, &rows->cut, s, number);
        BackwardBlock in = rows_backward_block(rows, set, block, buffers, NULL, dz_out);
        if (rows->uniform) {
            SumPair sums = loops_for[in.type].gradient_sums_uniform(in.x, in.mean, in.dz, block.n);
            double a = (double)sums.second * in.rstd;
            *c1 += (double)in.uniform_gain * sums.first, *c2 += in.uniform_gain * a; /* (41) */
            if (buffers->partials) {
                int64_t param = map_index(problem, &problem->param_map, map_base(&problem->param_map, o, block.r), block.j0);
                partials_add(buffers->partials, problem, rows->tensors, param,
                             map_index(problem, &problem->modulation_map, map_base(&problem->modulation_map, o, block.r), block.j0),
                             a, sums.first);
            }
        } else {
            float block_c1, block_c2;
            loops_for[in.type].gradient_sums(&block_c1, &block_c2, in.x, 0, &in.mean, &in.rstd, in.dz, in.gain, 1, block.n);
            *c1 += block_c1, *c2 += block_c2;
            if (buffers->partials && with_row_sums) {
                int64_t offset = row_sums_offset(rows, buffers, o, s, block);
                loops_for[in.type].add_products(buffers->a + offset, buffers->b + offset, in.x, 0, &in.mean, &in.rstd, in.dz, 1, block.n);
            }
        }
        if (buffers->kept_dz) dz_out += block.n;
    }
}

/* dx of a block. With `with_row_sums`, the block is added to the row sums here. */
static void rows_dx_block(const RowJob *rows, int64_t set, Block block, const float *kept_dz, RowBackwardBuffers *buffers,
                          int with_row_sums) {
    const Problem *problem = rows->problem;
    const Tensors *tensors = rows->tensors;
    int64_t o = fast_div(set, problem->sets), index = dense_index(problem, o, block.r, block.j0), n = block.n;
    BackwardBlock in = rows_backward_block(rows, set, block, buffers, kept_dz, buffers->dz);
    void *out = in.type == problem->type ? mutable_element_at(tensors->dx, index, problem->type) : buffers->out;
    const LoopTable *loops = loops_for + in.type;
    if (with_row_sums && !rows->uniform) {
        int64_t offset = row_sums_offset(rows, buffers, o, fast_mod(set, problem->sets), block);
        loops->add_products(buffers->a + offset, buffers->b + offset, in.x, 0, &in.mean, &in.rstd, in.dz, 1, n);
    }
    /* (9): dx does not use x_hat, which may be NaN. */
    if (problem->given_statistics) in.x = zero_block, in.mean = in.rstd = 0.0f;
    if (rows->uniform) loops->dx_uniform(out, in.x, in.mean, in.dz, in.uniform_gain, tensors->c1[set], tensors->c2[set] * in.rstd,
                                         tensors->rstd[set], n);
    else loops->dx_rows(out, in.x, 0, &in.mean, &in.rstd, tensors->rstd + set, in.dz, in.gain, tensors->c1 + set, tensors->c2 + set, 1, n);
    if (tensors->dsum) add_to(out, floats_at(tensors->dsum, index, n, problem->type, buffers->dy), n);
    if (in.type != problem->type) store_floats(tensors->dx, index, out, n, problem->type);
}

static void write_coefficients(const Problem *problem, const Tensors *tensors, int64_t set, double c1, double c2) {
    double count = (double)(problem->reps * problem->fold * problem->run);
    tensors->c1[set] = problem->given_statistics || !problem->centered ? 0.0f : (float)(c1 / count);
    tensors->c2[set] = problem->given_statistics ? 0.0f : (float)(c2 / count);
}

static void row_backward_start(const RowJob *rows, RowBackwardBuffers *buffers, const Partials *partials, int64_t sum_columns) {
    affine_cache_clear(&buffers->affine);
    buffers->rows = 0, buffers->o = buffers->r = buffers->s = -1;
    buffers->partials = any_parameter_gradient(rows->tensors) ? partials : NULL;
    buffers->a = (float *)(buffers + 1), buffers->b = buffers->a + sum_columns + ARRAY_GAP;
    buffers->kept_dz = rows->keeps_dz ? buffers->b + sum_columns + ARRAY_GAP : NULL;
    fill(buffers->a, 0.0f, 2 * (sum_columns + ARRAY_GAP));
}

static int64_t row_sum_columns(const RowJob *rows) {
    return !rows->uniform ? (min(rows->problem->run, rows->cut.blocks_per_piece * rows->cut.block_size) + 15) / 16 * 16 : 0;
}

/* One part of all sets: the sums and dx of each set. */
static void rows_backward_sets_task(void *job, int64_t part, void *scratch) {
    const RowJob *rows = job;
    RowBackwardBuffers *buffers = scratch;
    row_backward_start(rows, buffers, rows->partials + part, row_sum_columns(rows));
    int64_t end = rows->sets * (part + 1) / rows->parts;
    int sums_with_dx = buffers->partials && rows->tensors->dx; /* row sums while computing dx */
    for (int64_t set = rows->sets * part / rows->parts; set < end; set++) {
        double c1 = 0.0, c2 = 0.0, piece_c1, piece_c2;
        const float *kept_dz = buffers->kept_dz;
        for (int64_t piece = 0; piece < rows->cut.pieces; piece++) {
            rows_piece_sums(rows, set, piece, buffers, &piece_c1, &piece_c2, !sums_with_dx);
            c1 += piece_c1, c2 += piece_c2;
        }
        write_coefficients(rows->problem, rows->tensors, set, c1, c2);
        if (!rows->tensors->dx) continue;
        for (int64_t number = 0; number < rows->cut.blocks; number++) {
            Block block = block_at(rows->problem, &rows->cut, fast_mod(set, rows->problem->sets), number);
            rows_dx_block(rows, set, block, kept_dz, buffers, sums_with_dx);
            if (kept_dz) kept_dz += block.n;
        }
    }
    flush_row_sums(rows, buffers);
}

/* Whether the pieces of a set use different parameters, and all sets use the same ones. Then a part is the same pieces
   of all sets, and needs few partial sums. */
static int pieces_own_parameters(const RowJob *rows) {
    const Problem *problem = rows->problem;
    return !rows->uniform && problem->reps == 1 && problem->sets == 1 && problem->param_map.a == 0 && problem->param_map.d &&
        !has_modulation(problem);
}

/* The sums of one part of a batch's pieces. */
static void rows_sums_task(void *job, int64_t batch, int64_t part, void *scratch) {
    const RowJob *rows = job;
    RowBackwardBuffers *buffers = scratch;
    int64_t pieces = rows->cut.pieces, sets = batch_sets(rows, batch), start, end;
    row_backward_start(rows, buffers, rows->partials + part, row_sum_columns(rows));
    if (pieces_own_parameters(rows)) start = pieces * part / rows->parts * sets, end = pieces * (part + 1) / rows->parts * sets;
    else start = sets * pieces * part / rows->parts, end = sets * pieces * (part + 1) / rows->parts;
    for (int64_t number = start; number < end; number++) {
        int64_t set = number / pieces, piece = number % pieces;
        if (pieces_own_parameters(rows)) set = number % sets, piece = number / sets;
        int64_t offset = set_piece_offset(rows, batch, set * pieces + piece);
        rows_piece_sums(rows, batch * rows->per_batch + set, piece, buffers, rows->c1 + offset, rows->c2 + offset, 1);
        flush_row_sums(rows, buffers);
    }
}

static void rows_merge_sums_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const RowJob *rows = job;
    (void)number, (void)scratch;
    for (int64_t set = 0; set < batch_sets(rows, batch); set++) {
        double c1 = 0.0, c2 = 0.0;
        int64_t start = set_piece_offset(rows, batch, set * rows->cut.pieces);
        for (int64_t i = start; i < start + rows->cut.pieces; i++) c1 += rows->c1[i], c2 += rows->c2[i];
        write_coefficients(rows->problem, rows->tensors, batch * rows->per_batch + set, c1, c2);
    }
}

static void rows_dx_piece_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const RowJob *rows = job;
    RowBackwardBuffers *buffers = scratch;
    int64_t set = batch * rows->per_batch + number / rows->cut.pieces, piece = number % rows->cut.pieces;
    int64_t end = min(rows->cut.blocks, (piece + 1) * rows->cut.blocks_per_piece);
    affine_cache_clear(&buffers->affine);
    for (int64_t number = piece * rows->cut.blocks_per_piece; number < end; number++)
        rows_dx_block(rows, set, block_at(rows->problem, &rows->cut, fast_mod(set, rows->problem->sets), number), NULL, buffers, 0);
}

/* The parameters that pieces start to end use. */
static Range parameters_of_pieces(const Problem *problem, const SetCut *cut, int64_t start, int64_t end) {
    int64_t from = start * cut->blocks_per_piece * cut->block_size, to = min(problem->run, end * cut->blocks_per_piece * cut->block_size);
    return (Range){from / problem->param_map.channel_run * problem->param_map.d,
                   ((to - 1) / problem->param_map.channel_run - from / problem->param_map.channel_run) * problem->param_map.d + 1};
}

/* If `with_sums` is 0, c1 and c2 are given, and only dx is computed. */
static int rows_backward(const Problem *problem, const Tensors *tensors, int64_t threads, int with_sums) {
    int64_t size = problem->reps * problem->run;
    RowJob rows = make_row_job(problem, tensors, is_direct(problem, tensors));
    int shared = !with_sums || rows_share_sets(problem, 1 << 16), own_parameters = shared && pieces_own_parameters(&rows);
    rows.keeps_dz = problem->activation && !shared && size <= MAX_KEPT_DZ;
    int64_t all_sets = rows.sets;
    rows.shared = shared, rows.per_batch = min(all_sets, batch_size(2 * size * element_size(problem->type)));
    rows.parts = !with_sums ? 0 : own_parameters ? min(MAX_PARTS, rows.cut.pieces)
        : min(part_count(problem, tensors), shared ? rows.per_batch * rows.cut.pieces : all_sets);
    int64_t scratch = aligned_size((int64_t)sizeof(RowBackwardBuffers)
                                   + 4 * (2 * (row_sum_columns(&rows) + ARRAY_GAP) + (rows.keeps_dz ? size : 0)));
    Partials partials[MAX_PARTS];
    int64_t bytes = 0, partials_offset[MAX_PARTS + 1];
    for (int64_t part = 0; part < rows.parts; part++) {
        int64_t start = shared ? 0 : all_sets * part / rows.parts / problem->sets;
        int64_t end = shared ? problem->outer : (all_sets * (part + 1) / rows.parts - 1) / problem->sets + 1;
        int64_t part_bytes = partials_plan(partials + part, problem, tensors, start, end);
        if (own_parameters) {
            partials[part].range[0] = parameters_of_pieces(problem, &rows.cut, rows.cut.pieces * part / rows.parts,
                                                           rows.cut.pieces * (part + 1) / rows.parts);
            part_bytes = partials_bytes(tensors, partials[part].range);
        }
        partials_offset[part] = bytes, bytes += part_bytes;
    }
    int64_t coefficients = shared && with_sums ? BATCHES_IN_FLIGHT * rows.per_batch * rows.cut.pieces : 0;
    char *memory = allocate_buffer(threads * scratch + bytes + 16 * coefficients);
    if (!memory) return 1;
    char *after_scratch = memory + threads * scratch;
    for (int64_t part = 0; part < rows.parts; part++)
        partials_clear(partials + part, tensors, (double *)(after_scratch + partials_offset[part]));
    rows.partials = partials, rows.c1 = (double *)(after_scratch + bytes), rows.c2 = rows.c1 + coefficients;
    if (!shared) run_parallel(rows_backward_sets_task, &rows, rows.parts, threads, memory, scratch);
    else {
        BatchLoop loop = {.job = &rows, .scratch = memory, .scratch_size = scratch, .batches = ceil_div(all_sets, rows.per_batch),
                          .ordered = 1};
        if (with_sums)
            loop.stages[0] = (Stage){rows_sums_task, rows.parts, rows.parts}, loop.stages[1] = (Stage){rows_merge_sums_task, 1, 1};
        if (tensors->dx) loop.stages[2] = set_pieces_stage(&rows, rows_dx_piece_task);
        run_batches(&loop, threads);
    }
    if (with_sums) partials_reduce(problem, tensors, partials, rows.parts, threads);
    release_buffer(memory);
    return 0;
}
