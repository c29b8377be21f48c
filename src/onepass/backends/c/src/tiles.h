/* The tile walk, forward: row by row, across sets that are side by side in memory. It suits sets with short runs.

   Sums over rows are arrays with one number for each column. At the end, the columns of a set are merged.
   A task is a chunk (columns of whole sets of a sample), or a piece (some rows of a sample that threads share). */
#pragma once
#include "rows.h"

enum { CACHE_BYTES = 1 << 19 }; /* this much stays in the second-level cache between two passes */
enum { NARROW_BYTES = 1024 };   /* reading less than this of each row is slow */
enum { MERGE_ELEMENTS = 1 << 14 }; /* numbers that a merge task reads */

typedef struct {
    const Problem *problem;
    const Tensors *tensors;
    int64_t chunk_columns, chunks;         /* columns of a chunk, chunks of a sample */
    int64_t piece_rows, pieces;            /* rows of a piece, pieces of a sample */
    int64_t per_batch;                     /* samples that threads share at a time */
    double *mean_or_wdy, *m2_or_wdy_x_hat; /* (slot, sample, piece, column): moments; in a backward, sums */
    Partials *partials;
    int64_t parts;
    int uniform;                           /* all columns of a row share their parameters */
} TileJob;

typedef struct {
    AffineCache affine;
    ALIGNED_FLOAT x[BLOCK];
    ALIGNED_FLOAT out[BLOCK];
    ALIGNED_FLOAT mean[BLOCK];
    ALIGNED_FLOAT rstd[BLOCK];
    ALIGNED_FLOAT factor[BLOCK];
} TileBuffers;

/* mean and m2 of the columns j0 to j1, over rows r0 to r1. */
static void tile_column_moments(const TileJob *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, double *mean, double *m2,
                                TileBuffers *buffers) {
    for (int64_t i = 0; i < j1 - j0; i++) mean[i] = m2[i] = 0.0;
    for (int64_t j = j0; j < j1; j += COLUMN_SPAN) for (int64_t r = r0, rows; r < r1; r += rows) {
        int64_t n = min(COLUMN_SPAN, j1 - j);
        TypedRow x[MAX_ROWS];
        rows = min(r == r0 ? FIRST_ROWS : MAX_ROWS, r1 - r);
        for (int64_t k = 0; k < rows; k++) x[k] = norm_input(tiles->problem, tiles->tensors, o, r + k, j, n, 1, buffers->x).data;
        merge_columns(mean + (j - j0), m2 + (j - j0), r - r0, x, tiles->problem->type, rows, n, (int)tiles->problem->centered);
    }
}

/* Merge the columns of a set, which have problem->reps rows each. A folded row has these columns several times. */
static Moments merge_set_columns(const Problem *problem, const double *mean, const double *m2) {
    int64_t unfolded = problem->sets * problem->run;
    double set_mean = 0.0, squares = 0.0, columns = (double)(problem->fold * problem->run);
    for (int64_t k = 0; k < problem->fold; k++) for (int64_t column = k * unfolded; column < k * unfolded + problem->run; column++)
        set_mean += mean[column], squares += m2[column];
    set_mean /= columns;
    if (problem->centered && columns > 1.0)
        for (int64_t k = 0; k < problem->fold; k++)
            for (int64_t column = k * unfolded; column < k * unfolded + problem->run; column++)
                squares += (double)problem->reps * (mean[column] - set_mean) * (mean[column] - set_mean);
    return (Moments){(double)problem->reps * columns, set_mean, squares};
}

/* The statistic of each column's set. */
static void expand_statistic(float *restrict to, const float *restrict stat, const Problem *problem, int64_t o, int64_t j0, int64_t n) {
    const float *sample_stat = stat + o * problem->sets;
    if (problem->fold > 1 && n > unfolded_columns(problem, n)) {
        expand_statistic(to, stat, problem, o, 0, unfolded_columns(problem, n));
        repeat_columns(to, unfolded_columns(problem, n), n);
    } else if (problem->run == 1) memcpy(to, sample_stat + j0, (size_t)n * 4);
    else {
        int64_t s = set_of_column(problem, j0), within = fast_mod(j0, problem->run);
        for (int64_t i = 0; i < n; within = 0, s = s + 1 == problem->sets ? 0 : s + 1) {
            float value = sample_stat[s];
            for (int64_t end = min(n, i + problem->run - within); i < end; i++) to[i] = value;
        }
    }
}

/* Whether rows of a sample use different parameters. */
static int parameters_vary_by_row(const Problem *problem) {
    return (has_affine(problem) && problem->param_map.b) || (has_modulation(problem) && problem->modulation_map.b);
}
/* Whether all columns of a row share their parameters. */
static int row_is_uniform(const Problem *problem) {
    return (!has_affine(problem) || is_constant(problem, &problem->param_map)) &&
        (!has_modulation(problem) || is_constant(problem, &problem->modulation_map));
}

/* Set buffers->factor to rstd·gain for each column, and return the slot with gain and term. */
static const AffineSlot *column_factors(const Problem *problem, const Tensors *tensors, int64_t o, int64_t r, int64_t j, int64_t n,
                                        TileBuffers *buffers) {
    const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, o, r, j, n);
    memcpy(buffers->factor, buffers->rstd, (size_t)n * 4);
    multiply_by(buffers->factor, slot->gain, n);
    return slot;
}

static void tile_normalize_rows(const TileJob *tiles, int64_t o, int64_t r0, int64_t r1, int64_t j0, int64_t j1, TileBuffers *buffers) {
    const Problem *problem = tiles->problem;
    const Tensors *tensors = tiles->tensors;
    int parameters_vary = parameters_vary_by_row(problem);
    int in_pairs = !tiles->uniform && !parameters_vary && !problem->activation && !problem->residual_type && problem->x_type == problem->type;
    affine_cache_clear(&buffers->affine);
    for (int64_t j = j0; j < j1; j += BLOCK) {
        int64_t n = min(BLOCK, j1 - j);
        const AffineSlot *slot = NULL;
        expand_statistic(buffers->mean, tensors->mean, problem, o, j, n);
        expand_statistic(buffers->rstd, tensors->rstd, problem, o, j, n);
        int64_t r = r0;
        if (in_pairs && r1 - r0 > 1) {
            slot = column_factors(problem, tensors, o, r, j, n, buffers);
            for (; r + 2 <= r1; r += 2)
                loops_for[problem->type].normalize_two_rows(
                    mutable_element_at(tensors->y, dense_index(problem, o, r, j), problem->type),
                    mutable_element_at(tensors->y, dense_index(problem, o, r + 1, j), problem->type),
                    element_at(tensors->x, x_index(problem, o, r, j), problem->type),
                    element_at(tensors->x, x_index(problem, o, r + 1, j), problem->type), buffers->mean, buffers->factor, slot->term, n);
        }
        for (; r < r1; r++) {
            int64_t index = dense_index(problem, o, r, j);
            TypedArray x = norm_input(problem, tensors, o, r, j, n, (int)problem->given_statistics, buffers->x);
            LoopOperands loop = loop_operands(problem, !problem->activation, x, tensors->y, index, n, buffers->x, buffers->out);
            if (r + 2 < r1) {
                prefetch(tensors->x, x_index(problem, o, r + 2, j), n, problem->x_type, 0);
                prefetch(tensors->y, dense_index(problem, o, r + 2, j), n, problem->type, 1);
            }
            if (tiles->uniform) {
                float gain, term;
                uniform_affine(problem, tensors, o, r, j, &gain, &term);
                loops_for[loop.type].normalize_columns_uniform(loop.out, loop.x, buffers->mean, buffers->rstd, gain, term, n);
            } else {
                if (parameters_vary || !slot) slot = column_factors(problem, tensors, o, r, j, n, buffers);
                loops_for[loop.type].normalize_columns(loop.out, loop.x, buffers->mean, buffers->factor, slot->term, n);
            }
            if (problem->activation) activate(tensors->y, index, loop.out, n, problem->activation, problem->type);
            else if (loop.type != problem->type) store_floats(tensors->y, index, loop.out, n, problem->type);
        }
    }
}

/* A chunk. It is read for its statistics and again for y while it is in the cache. */
static void tiles_whole_sets_task(void *job, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    const Problem *problem = tiles->problem;
    TileBuffers *buffers = scratch;
    double *mean = (double *)(buffers + 1), *m2 = mean + tiles->chunk_columns;
    int64_t o = number / tiles->chunks, j0 = number % tiles->chunks * tiles->chunk_columns;
    int64_t j1 = min(j0 + tiles->chunk_columns, row_width(problem));
    if (!problem->given_statistics) {
        tile_column_moments(tiles, o, 0, problem->reps, j0, j1, mean, m2, buffers);
        for (int64_t j = 0; j < min(j1 - j0, problem->sets * problem->run); j += problem->run)
            write_statistics(problem, tiles->tensors, o * problem->sets + (j0 + j) / problem->run,
                             merge_set_columns(problem, mean + j, m2 + j));
    }
    if (tiles->tensors->y) tile_normalize_rows(tiles, o, 0, problem->reps, j0, j1, buffers);
}

/* The samples of a batch, which threads share. */
static int64_t batch_samples(const TileJob *tiles, int64_t batch) {
    return min(tiles->per_batch, tiles->problem->outer - batch * tiles->per_batch);
}

/* Where the moments or sums of piece `number` of a batch are. */
static int64_t piece_offset(const TileJob *tiles, int64_t batch, int64_t number) {
    return (batch % BATCHES_IN_FLIGHT * tiles->per_batch * tiles->pieces + number) * row_width(tiles->problem);
}

/* Piece `number` of a batch: rows r0 to r1 of sample o. */
typedef struct { int64_t o, r0, r1; } Piece;

static Piece piece_at(const TileJob *tiles, int64_t batch, int64_t number) {
    int64_t r0 = number % tiles->pieces * tiles->piece_rows;
    return (Piece){batch * tiles->per_batch + number / tiles->pieces, r0, min(r0 + tiles->piece_rows, tiles->problem->reps)};
}

static void tiles_piece_moments_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    Piece piece = piece_at(tiles, batch, number);
    int64_t offset = piece_offset(tiles, batch, number);
    tile_column_moments(tiles, piece.o, piece.r0, piece.r1, 0, row_width(tiles->problem), tiles->mean_or_wdy + offset,
                        tiles->m2_or_wdy_x_hat + offset, scratch);
}

/* Some sets of a shared sample. A task merges several sets, since merging one takes less time than starting a task. */
typedef struct { int64_t sample, start, end; } MergeSets;

static int64_t sets_per_merge_task(const TileJob *tiles) {
    return max(1, MERGE_ELEMENTS / (tiles->pieces * tiles->problem->fold * tiles->problem->run));
}
static int64_t merge_tasks(const TileJob *tiles) { return ceil_div(tiles->problem->sets, sets_per_merge_task(tiles)); } /* of a sample */

static MergeSets merge_sets_at(const TileJob *tiles, int64_t number) {
    int64_t start = number % merge_tasks(tiles) * sets_per_merge_task(tiles);
    return (MergeSets){number / merge_tasks(tiles), start, min(tiles->problem->sets, start + sets_per_merge_task(tiles))};
}

/* The moments of some sets: merge the pieces of each column, then the columns of each set. */
static void tiles_merge_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    const Problem *problem = tiles->problem;
    MergeSets sets = merge_sets_at(tiles, number);
    int64_t width = row_width(problem), offset = piece_offset(tiles, batch, sets.sample * tiles->pieces);
    double *mean = tiles->mean_or_wdy + offset, *m2 = tiles->m2_or_wdy_x_hat + offset;
    (void)scratch;
    for (int64_t piece = 1; piece < tiles->pieces; piece++) for (int64_t k = 0; k < problem->fold; k++) {
        int64_t column = (k * problem->sets + sets.start) * problem->run, n = (sets.end - sets.start) * problem->run;
        int64_t before = piece * tiles->piece_rows, rows = min(problem->reps - before, tiles->piece_rows);
        if (!problem->centered) add_doubles(m2 + column, m2 + piece * width + column, n);
        else merge_double_moments(mean + column, m2 + column, mean + piece * width + column, m2 + piece * width + column, (double)before,
                                  (double)rows, n);
    }
    for (int64_t s = sets.start; s < sets.end; s++)
        write_statistics(problem, tiles->tensors, (batch * tiles->per_batch + sets.sample) * problem->sets + s,
                         merge_set_columns(problem, mean + s * problem->run, m2 + s * problem->run));
}

static void tiles_normalize_piece_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const TileJob *tiles = job;
    Piece piece = piece_at(tiles, batch, number);
    tile_normalize_rows(tiles, piece.o, piece.r0, piece.r1, 0, row_width(tiles->problem), scratch);
}

/* A stage with `per_sample` tasks for each sample of a batch. */
static Stage sample_stage(const TileJob *tiles, StageTask task, int64_t per_sample) {
    int64_t last = ceil_div(tiles->problem->outer, tiles->per_batch) - 1;
    return (Stage){task, per_sample * tiles->per_batch, per_sample * batch_samples(tiles, last)};
}

/* Choose chunks and pieces. Returns whether threads share samples, because chunks would be narrow, too large for the
   cache, or too few. `bytes` are read for each element. */
static int cut_tiles(TileJob *tiles, int64_t bytes) {
    const Problem *problem = tiles->problem;
    int64_t width = row_width(problem), sets = max(1, CACHE_BYTES / max(1, problem->reps * problem->run * bytes));
    tiles->chunk_columns = problem->fold > 1 ? width : min(width, min(sets, max(1, 4 * BLOCK / problem->run)) * problem->run);
    int64_t eighth = ceil_div(width / problem->run, 8) * problem->run; /* for about 8 tasks */
    if (problem->fold == 1 && problem->outer < 8 && eighth < tiles->chunk_columns && eighth * element_size(problem->type) >= NARROW_BYTES)
        tiles->chunk_columns = eighth;
    tiles->chunks = ceil_div(width, tiles->chunk_columns);
    /* Each piece costs a sum of its first rows and a merge, so large pieces are better. But all threads need pieces. */
    int64_t sample = problem->reps * width, all = problem->outer * sample;
    int64_t times = all >= 64 * PIECE_ELEMENTS ? 4 : sample >= 16 * PIECE_ELEMENTS ? 2 : 1;
    tiles->piece_rows = max(FIRST_ROWS, times * PIECE_ELEMENTS / width), tiles->pieces = ceil_div(problem->reps, tiles->piece_rows);
    if (tiles->chunk_columns * element_size(problem->type) < NARROW_BYTES && tiles->chunk_columns < width) return 1;
    return problem->reps * tiles->chunk_columns * bytes > 2 * CACHE_BYTES ||
        (problem->outer * tiles->chunks < 8 && problem->reps * width > PIECE_ELEMENTS / 4 && tiles->pieces > 1);
}

static int tiles_forward(const Problem *problem, const Tensors *tensors, int64_t threads) {
    TileJob tiles = {.problem = problem, .tensors = tensors, .uniform = row_is_uniform(problem)};
    int shared = cut_tiles(&tiles, element_size(problem->type));
    int64_t width = row_width(problem);
    tiles.per_batch = shared ? min(problem->outer, batch_size(problem->reps * width * element_size(problem->type))) : 0;
    int64_t moments = problem->given_statistics ? 0 : BATCHES_IN_FLIGHT * tiles.per_batch * tiles.pieces * width;
    int64_t scratch = aligned_size((int64_t)sizeof(TileBuffers) + (shared ? 0 : 16 * tiles.chunk_columns));
    char *memory = allocate_buffer(threads * scratch + 16 * moments);
    if (!memory) return 1;
    tiles.mean_or_wdy = (double *)(memory + threads * scratch), tiles.m2_or_wdy_x_hat = tiles.mean_or_wdy + moments;
    if (!shared) run_parallel(tiles_whole_sets_task, &tiles, problem->outer * tiles.chunks, threads, memory, scratch);
    else {
        BatchLoop loop = {.job = &tiles, .scratch = memory, .scratch_size = scratch, .batches = ceil_div(problem->outer, tiles.per_batch)};
        if (!problem->given_statistics)
            loop.stages[0] = sample_stage(&tiles, tiles_piece_moments_task, tiles.pieces),
                loop.stages[1] = sample_stage(&tiles, tiles_merge_task, merge_tasks(&tiles));
        if (tensors->y) loop.stages[2] = sample_stage(&tiles, tiles_normalize_piece_task, tiles.pieces);
        run_batches(&loop, threads);
    }
    release_buffer(memory);
    return 0;
}
