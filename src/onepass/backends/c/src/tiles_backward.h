/* The tile walk, backward: sums over the rows of each column, then c1 and c2 of the sets, then dx. */
#pragma once
#include "rows_backward.h"
#include "tiles.h"

typedef struct {
    AffineCache affine;
    ALIGNED_FLOAT x[BLOCK];
    ALIGNED_FLOAT dy[BLOCK];
    ALIGNED_FLOAT dz[BLOCK];
    ALIGNED_FLOAT out[BLOCK];
    ALIGNED_FLOAT mean[BLOCK];
    ALIGNED_FLOAT rstd[BLOCK];
    ALIGNED_FLOAT a[BLOCK + ARRAY_GAP];
    ALIGNED_FLOAT b[BLOCK + ARRAY_GAP];
    ALIGNED_FLOAT zeros[BLOCK];
    ALIGNED_FLOAT ones[BLOCK];
    ALIGNED_FLOAT c1[BLOCK];
    ALIGNED_FLOAT c2[BLOCK];
    ALIGNED_FLOAT dz_factor[BLOCK];
    ALIGNED_FLOAT x_factor[BLOCK];
    ALIGNED_FLOAT constant[BLOCK];
} TileBackwardBuffers;

/* The inputs of a row: x and dz, of one type, with x_hat = (x - mean)·rstd. uniform_gain is for uniform rows. */
typedef struct { int64_t type; const void *x, *dz; const float *gain, *mean, *rstd; float uniform_gain; } BackwardRow;

static void tile_backward_start(const TileJob *tiles, int64_t o, int64_t j, int64_t n, TileBackwardBuffers *buffers) {
    affine_cache_clear(&buffers->affine);
    fill(buffers->zeros, 0.0f, n), fill(buffers->ones, 1.0f, n);
    if (tiles->tensors->mean) expand_statistic(buffers->mean, tiles->tensors->mean, tiles->problem, o, j, n);
    else fill(buffers->mean, 0.0f, n);
    expand_statistic(buffers->rstd, tiles->tensors->rstd, tiles->problem, o, j, n);
}

static BackwardRow tile_backward_row(const TileJob *tiles, int64_t o, int64_t r, int64_t j, int64_t n, TileBackwardBuffers *buffers) {
    const Problem *problem = tiles->problem;
    const Tensors *tensors = tiles->tensors;
    int64_t index = dense_index(problem, o, r, j);
    TypedArray x = norm_input(problem, tensors, o, r, j, n, 0, buffers->x);
    BackwardRow in = {problem->type, x.data, element_at(tensors->dy, index, problem->type), NULL, buffers->mean, buffers->rstd, 0.0f};
    if (tiles->uniform) {
        float term;
        uniform_affine(problem, tensors, o, r, j, &in.uniform_gain, &term);
        if (is_direct(problem, tensors)) return in;
    }
    const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, o, r, j, n);
    in.gain = slot->gain;
    if (is_direct(problem, tensors)) return in;
    in.type = F32, in.x = array_as_floats(x, n, buffers->x), in.dz = floats_at(tensors->dy, index, n, problem->type, buffers->dy);
    if (problem->from_y) {
        x_hat_from_y(buffers->out, in.x, slot->gain, slot->term, n);
        memcpy(buffers->x, buffers->out, (size_t)n * 4);
        in.x = buffers->x, in.mean = buffers->zeros, in.rstd = buffers->ones;
    }
    if (problem->activation) {
        activation_backward_columns(buffers->dz, in.dz, in.x, in.mean, in.rstd, in.gain, slot->term, n, problem->activation);
        in.dz = buffers->dz;
    }
    return in;
}

VECTOR_LOOP void add_weighted_to_doubles(double *restrict sum, const float *restrict gain, const float *restrict x, int64_t n) {
    for (int64_t i = 0; i < n; i++) sum[i] += (double)gain[i] * x[i];
}

/* Σ wdy and Σ wdy·x_hat of each column over rows r0 to r1. Also adds to the partial sums, if there are any. */
static void tile_column_sums(const TileJob *tiles, const Partials *partials, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1,
                             double *wdy, double *wdy_x_hat, TileBackwardBuffers *buffers) {
    const Problem *problem = tiles->problem;
    int parameters_vary = parameters_vary_by_row(problem) || tiles->uniform;
    for (int64_t i = 0; i < j1 - j0; i++) wdy[i] = wdy_x_hat[i] = 0.0;
    for (int64_t j = j0; j < j1; j += BLOCK, wdy += BLOCK, wdy_x_hat += BLOCK) {
        int64_t n = min(BLOCK, j1 - j);
        tile_backward_start(tiles, o, j, n, buffers);
        fill(buffers->a, 0.0f, n), fill(buffers->b, 0.0f, n);
        for (int64_t r = r0; r < r1; r++) {
            BackwardRow in = tile_backward_row(tiles, o, r, j, n, buffers);
            const LoopTable *loops = loops_for + in.type;
            if (!parameters_vary) loops->add_column_products(buffers->a, buffers->b, in.x, in.dz, in.mean, in.rstd, n);
            else if (tiles->uniform)
                loops->add_column_products_uniform(buffers->a, buffers->b, in.x, in.dz, in.mean, in.rstd, in.uniform_gain, n);
            else loops->add_column_products_weighted(buffers->a, buffers->b, in.x, in.dz, in.mean, in.rstd, in.gain, n);
            if (partials && tiles->uniform) {
                SumPair sums = loops->row_sums(in.x, in.dz, in.mean, in.rstd, n);
                partials_add(partials, problem, tiles->tensors, map_base(&problem->param_map, o, r),
                             map_base(&problem->modulation_map, o, r), sums.second, sums.first);
            } else if (partials && parameters_vary) {
                loops->row_products(buffers->x_factor, buffers->dz_factor, in.x, in.dz, in.mean, in.rstd, n);
                partials_add_columns(partials, problem, tiles->tensors, o, r, j, n, buffers->x_factor, buffers->dz_factor);
            }
            if ((r - r0) % ROWS_PER_FLUSH == ROWS_PER_FLUSH - 1 || r == r1 - 1) {
                if (partials && !parameters_vary)
                    partials_add_columns(partials, problem, tiles->tensors, o, r, j, n, buffers->a, buffers->b);
                add_weighted_to_doubles(wdy, parameters_vary ? buffers->ones : in.gain, buffers->b, n); /* (41) */
                add_weighted_to_doubles(wdy_x_hat, parameters_vary ? buffers->ones : in.gain, buffers->a, n);
                fill(buffers->a, 0.0f, n), fill(buffers->b, 0.0f, n);
            }
        }
    }
}

/* x_factor and constant of dx = dz_factor·dz + x_factor·(x - mean) + constant, which is (8), for each column. */
VECTOR_LOOP void dx_factors(TileBackwardBuffers *restrict buffers, const float *restrict x_hat_rstd, int64_t n) {
    const float *restrict rstd = buffers->rstd, *restrict c1 = buffers->c1, *restrict c2 = buffers->c2;
    float *restrict x_factor = buffers->x_factor, *restrict constant = buffers->constant;
    for (int64_t i = 0; i < n; i++) x_factor[i] = -c2[i] * rstd[i] * x_hat_rstd[i], constant[i] = -c1[i] * rstd[i];
}

static void tile_dx_rows(const TileJob *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, TileBackwardBuffers *buffers) {
    const Problem *problem = tiles->problem;
    const Tensors *tensors = tiles->tensors;
    int parameters_vary = parameters_vary_by_row(problem);
    for (int64_t j = j0; j < j1; j += BLOCK) {
        int64_t n = min(BLOCK, j1 - j);
        tile_backward_start(tiles, o, j, n, buffers);
        expand_statistic(buffers->c1, tensors->c1, problem, o, j, n);
        expand_statistic(buffers->c2, tensors->c2, problem, o, j, n);
        for (int64_t r = r0; r < r1; r++) {
            BackwardRow in = tile_backward_row(tiles, o, r, j, n, buffers);
            int64_t index = dense_index(problem, o, r, j);
            void *out = in.type == problem->type ? mutable_element_at(tensors->dx, index, problem->type) : buffers->out;
            if (r == r0 && problem->given_statistics) fill(buffers->x_factor, 0.0f, n), fill(buffers->constant, 0.0f, n);
            else if (r == r0) dx_factors(buffers, in.rstd, n);
            /* (9): dx does not use x_hat, which may be NaN. */
            if (problem->given_statistics) in.x = zero_block, in.mean = buffers->zeros;
            if (tiles->uniform) {
                loops_for[in.type].dx_columns_uniform(out, in.x, in.dz, in.mean, buffers->rstd, in.uniform_gain, buffers->x_factor,
                                                      buffers->constant, n);
            } else {
                if (parameters_vary || r == r0) {
                    memcpy(buffers->dz_factor, buffers->rstd, (size_t)n * 4);
                    multiply_by(buffers->dz_factor, in.gain, n);
                }
                loops_for[in.type].dx_columns(out, in.x, in.dz, in.mean, buffers->dz_factor, buffers->x_factor, buffers->constant, n);
            }
            if (tensors->dsum) add_to(out, floats_at(tensors->dsum, index, n, problem->type, buffers->dy), n);
            if (in.type != problem->type) store_floats(tensors->dx, index, out, n, problem->type);
        }
    }
}

static void write_set_coefficients(const TileJob *tiles, int64_t set, const double *wdy, const double *wdy_x_hat) {
    double c1 = 0.0, c2 = 0.0;
    int64_t unfolded = tiles->problem->sets * tiles->problem->run;
    for (int64_t k = 0; k < tiles->problem->fold; k++)
        for (int64_t column = k * unfolded; column < k * unfolded + tiles->problem->run; column++)
            c1 += wdy[column], c2 += wdy_x_hat[column];
    write_coefficients(tiles->problem, tiles->tensors, set, c1, c2);
}

/* One part of all chunks. */
static void tiles_backward_chunks_task(void *job, int64_t part, void *scratch) {
    const TileJob *tiles = job;
    const Problem *problem = tiles->problem;
    TileBackwardBuffers *buffers = scratch;
    double *wdy = (double *)(buffers + 1), *wdy_x_hat = wdy + tiles->chunk_columns;
    int64_t task_count = problem->outer * tiles->chunks, end = task_count * (part + 1) / tiles->parts;
    for (int64_t number = task_count * part / tiles->parts; number < end; number++) {
        int64_t o = number / tiles->chunks, j0 = number % tiles->chunks * tiles->chunk_columns;
        int64_t j1 = min(j0 + tiles->chunk_columns, row_width(problem));
        tile_column_sums(tiles, any_parameter_gradient(tiles->tensors) ? tiles->partials + part : NULL, o, 0, problem->reps, j0, j1, wdy,
                         wdy_x_hat, buffers);
        for (int64_t j = 0; j < min(j1 - j0, problem->sets * problem->run); j += problem->run)
            write_set_coefficients(tiles, o * problem->sets + (j0 + j) / problem->run, wdy + j, wdy_x_hat + j);
        if (tiles->tensors->dx) tile_dx_rows(tiles, o, 0, problem->reps, j0, j1, buffers);
    }
}

static void tiles_dx_piece_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    Piece piece = piece_at(tiles, batch, number);
    tile_dx_rows(tiles, piece.o, piece.r0, piece.r1, 0, row_width(tiles->problem), scratch);
}

/* The sums of one part of a batch's pieces. With given statistics, dx does not depend on sums and follows at once. */
static void tiles_piece_sums_task(void *job, int64_t batch, int64_t part, void *scratch) {
    const TileJob *tiles = job;
    const Partials *partials = any_parameter_gradient(tiles->tensors) ? tiles->partials + part : NULL;
    int64_t count = batch_samples(tiles, batch) * tiles->pieces, end = count * (part + 1) / tiles->parts;
    for (int64_t number = count * part / tiles->parts; number < end; number++) {
        Piece piece = piece_at(tiles, batch, number);
        int64_t offset = piece_offset(tiles, batch, number);
        tile_column_sums(tiles, partials, piece.o, piece.r0, piece.r1, 0, row_width(tiles->problem), tiles->mean_or_wdy + offset,
                         tiles->m2_or_wdy_x_hat + offset, scratch);
        if (tiles->problem->given_statistics && tiles->tensors->dx) tiles_dx_piece_task(job, batch, number, scratch);
    }
}

static void tiles_merge_coefficients_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    const Problem *problem = tiles->problem;
    MergeSets sets = merge_sets_at(tiles, number);
    int64_t width = row_width(problem), offset = piece_offset(tiles, batch, sets.sample * tiles->pieces);
    double *wdy = tiles->mean_or_wdy + offset, *wdy_x_hat = tiles->m2_or_wdy_x_hat + offset;
    (void)scratch;
    for (int64_t piece = 1; piece < tiles->pieces; piece++) for (int64_t k = 0; k < problem->fold; k++) {
        int64_t column = (k * problem->sets + sets.start) * problem->run, n = (sets.end - sets.start) * problem->run;
        add_doubles(wdy + column, wdy + piece * width + column, n);
        add_doubles(wdy_x_hat + column, wdy_x_hat + piece * width + column, n);
    }
    for (int64_t s = sets.start; s < sets.end; s++)
        write_set_coefficients(tiles, (batch * tiles->per_batch + sets.sample) * problem->sets + s, wdy + s * problem->run,
                               wdy_x_hat + s * problem->run);
}

/* If `with_sums` is 0, c1 and c2 are given, and only dx is computed. */
static int tiles_backward(const Problem *problem, const Tensors *tensors, int64_t threads, int with_sums) {
    TileJob tiles = {.problem = problem, .tensors = tensors, .uniform = row_is_uniform(problem)};
    int shared = cut_tiles(&tiles, 2 * element_size(problem->type)) || !with_sums;
    int64_t width = row_width(problem);
    tiles.per_batch = min(problem->outer, batch_size(2 * problem->reps * width * element_size(problem->type)));
    int64_t columns = shared && with_sums ? BATCHES_IN_FLIGHT * tiles.per_batch * tiles.pieces * width : 0;
    int64_t task_count = shared ? tiles.per_batch * tiles.pieces : problem->outer * tiles.chunks;
    int64_t scratch = aligned_size((int64_t)sizeof(TileBackwardBuffers) + (shared ? 0 : 16 * tiles.chunk_columns));
    tiles.parts = with_sums ? min(part_count(problem, tensors), task_count) : 0;
    Partials partials[MAX_PARTS];
    int64_t bytes = 0, partials_offset[MAX_PARTS];
    for (int64_t part = 0; part < tiles.parts; part++) {
        int64_t start = shared ? 0 : task_count * part / tiles.parts / tiles.chunks;
        int64_t end = shared ? problem->outer : (task_count * (part + 1) / tiles.parts - 1) / tiles.chunks + 1;
        partials_offset[part] = bytes, bytes += partials_plan(partials + part, problem, tensors, start, end);
    }
    char *memory = allocate_buffer(threads * scratch + bytes + 16 * columns);
    if (!memory) return 1;
    char *after_scratch = memory + threads * scratch;
    for (int64_t part = 0; part < tiles.parts; part++)
        partials_clear(partials + part, tensors, (double *)(after_scratch + partials_offset[part]));
    tiles.partials = partials, tiles.mean_or_wdy = (double *)(after_scratch + bytes), tiles.m2_or_wdy_x_hat = tiles.mean_or_wdy + columns;
    if (!shared) run_parallel(tiles_backward_chunks_task, &tiles, tiles.parts, threads, memory, scratch);
    else {
        BatchLoop loop = {.job = &tiles, .scratch = memory, .scratch_size = scratch, .batches = ceil_div(problem->outer, tiles.per_batch),
                          .ordered = 1};
        if (with_sums) loop.stages[0] = (Stage){tiles_piece_sums_task, tiles.parts, tiles.parts};
        if (with_sums && !problem->given_statistics)
            loop.stages[1] = sample_stage(&tiles, tiles_merge_coefficients_task, merge_tasks(&tiles));
        if (tensors->dx && !(with_sums && problem->given_statistics))
            loop.stages[2] = sample_stage(&tiles, tiles_dx_piece_task, tiles.pieces);
        run_batches(&loop, threads);
    }
    if (with_sums) partials_reduce(problem, tensors, partials, tiles.parts, threads);
    release_buffer(memory);
    return 0;
}
