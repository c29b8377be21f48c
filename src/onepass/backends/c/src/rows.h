/* The row walk, forward: one set after another, each along its runs. It suits sets with long runs.

   A task is a few whole sets, or a piece of a set that several threads share. */
#pragma once
#include "parameter_gradients.h"
#include "moments.h"

/* With an activation, dz is costly. Sets of at most this many elements keep it between the sums and dx. */
enum { MAX_KEPT_DZ = 1 << 14 };

/* How a set is cut. Runs consist of segments: elements that share their parameters, or the whole run.
   Segments consist of blocks, and a piece is several consecutive blocks. */
typedef struct { int64_t block_size, segment, blocks_per_segment, blocks_per_run, blocks, blocks_per_piece, pieces; } SetCut;

static SetCut cut_set(const Problem *problem, int64_t segment, int64_t size) {
    int64_t blocks_per_segment = ceil_div(segment, size), blocks_per_run = problem->run / segment * blocks_per_segment;
    int64_t count = problem->reps * blocks_per_run;
    int64_t blocks_per_piece = max(1, PIECE_ELEMENTS / min(segment, size));
    return (SetCut){size, segment, blocks_per_segment, blocks_per_run, count, blocks_per_piece, ceil_div(count, blocks_per_piece)};
}

/* Columns j0 to j0 + n of row r. */
typedef struct { int64_t r, j0, n; } Block;

static inline Block block_at(const Problem *problem, const SetCut *cut, int64_t s, int64_t number) {
    int64_t r = fast_div(number, cut->blocks_per_run), within = number - r * cut->blocks_per_run;
    int64_t segment = fast_div(within, cut->blocks_per_segment);
    int64_t start = (within - segment * cut->blocks_per_segment) * cut->block_size;
    return (Block){r, s * problem->run + segment * cut->segment + start, min(cut->block_size, cut->segment - start)};
}

typedef struct {
    const Problem *problem;
    const Tensors *tensors;
    SetCut cut;
    int uniform;             /* the elements of a block share their parameters */
    int64_t sets;
    int64_t per_batch;       /* sets that threads share at a time */
    int64_t per_task;        /* sets, or runs if statistics are given */
    Moments *pieces;         /* (slot, set, piece): moments, if threads share sets */
    double *c1, *c2;         /* in a backward: sums of each piece, likewise */
    Partials *partials;
    int64_t parts;
    int keeps_dz;
    int shared;              /* threads share sets */
} RowJob;

typedef struct { AffineCache affine; ALIGNED_FLOAT x[BLOCK]; ALIGNED_FLOAT out[BLOCK]; } RowBuffers;

static void rows_piece_moments(const RowJob *rows, int64_t set, int64_t piece, RowBuffers *buffers, Moments *moments) {
    const Problem *problem = rows->problem;
    int64_t end = min(rows->cut.blocks, (piece + 1) * rows->cut.blocks_per_piece), o = fast_div(set, problem->sets);
    int64_t s = fast_mod(set, problem->sets);
    *moments = (Moments){0.0, 0.0, 0.0};
    for (int64_t number = piece * rows->cut.blocks_per_piece; number < end; number++) {
        Block block = block_at(problem, &rows->cut, s, number);
        TypedArray x = norm_input(problem, rows->tensors, o, block.r, block.j0, block.n, 1, buffers->x);
        *moments = merge_array(*moments, x, block.n, (int)problem->centered);
    }
}

static void write_statistics(const Problem *problem, const Tensors *tensors, int64_t set, Moments moments) {
    float var;
    statistics_from_moments(tensors->mean + set, tensors->var ? tensors->var + set : &var, tensors->rstd + set, moments, problem->eps);
}

static void rows_normalize_block(const RowJob *rows, int64_t set, int64_t number, RowBuffers *buffers) {
    const Problem *problem = rows->problem;
    const Tensors *tensors = rows->tensors;
    int64_t o = fast_div(set, problem->sets);
    Block block = block_at(problem, &rows->cut, fast_mod(set, problem->sets), number);
    int64_t index = dense_index(problem, o, block.r, block.j0), n = block.n;
    TypedArray x = norm_input(problem, tensors, o, block.r, block.j0, n, (int)problem->given_statistics, buffers->x);
    LoopOperands loop = loop_operands(problem, !problem->activation, x, tensors->y, index, n, buffers->x, buffers->out);
    if (rows->uniform) {
        float gain, term;
        uniform_affine(problem, tensors, o, block.r, block.j0, &gain, &term);
        loops_for[loop.type].normalize_uniform(loop.out, loop.x, tensors->mean[set], tensors->rstd[set] * gain, term, n);
    } else {
        const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, o, block.r, block.j0, n);
        loops_for[loop.type].normalize_rows(loop.out, loop.x, 0, tensors->mean + set, tensors->rstd + set, slot->gain, slot->term, 1, n);
    }
    if (problem->activation) activate(tensors->y, index, loop.out, n, problem->activation, problem->type);
    else if (loop.type != problem->type) store_floats(tensors->y, index, loop.out, n, problem->type);
}

/* Some whole sets. A set is read for its statistics and again for y while it is in the cache. */
static void rows_whole_sets_task(void *job, int64_t number, void *scratch) {
    const RowJob *rows = job;
    RowBuffers *buffers = scratch;
    int64_t end = min(rows->sets, (number + 1) * rows->per_task);
    affine_cache_clear(&buffers->affine);
    for (int64_t set = number * rows->per_task; set < end; set++) {
        Moments all = {0.0, 0.0, 0.0}, moments;
        for (int64_t piece = 0; piece < rows->cut.pieces; piece++) {
            rows_piece_moments(rows, set, piece, buffers, &moments);
            all = merge_moments(all, moments, (int)rows->problem->centered);
        }
        write_statistics(rows->problem, rows->tensors, set, all);
        if (!rows->tensors->y) continue;
        for (int64_t block = 0; block < rows->cut.blocks; block++) rows_normalize_block(rows, set, block, buffers);
    }
}

/* Some runs, in the order of memory, if the statistics are given. */
static void rows_given_statistics_task(void *job, int64_t number, void *scratch) {
    const RowJob *rows = job;
    const Problem *problem = rows->problem;
    RowBuffers *buffers = scratch;
    int64_t end = min(problem->outer * problem->reps * problem->sets, (number + 1) * rows->per_task);
    affine_cache_clear(&buffers->affine);
    for (int64_t run = number * rows->per_task; run < end; run++) {
        int64_t row = fast_div(run, problem->sets), o = fast_div(row, problem->reps), r = row - o * problem->reps;
        int64_t set = o * problem->sets + run - row * problem->sets;
        for (int64_t block = r * rows->cut.blocks_per_run; block < (r + 1) * rows->cut.blocks_per_run; block++)
            rows_normalize_block(rows, set, block, buffers);
    }
}

static int64_t batch_sets(const RowJob *rows, int64_t batch) { return min(rows->per_batch, rows->sets - batch * rows->per_batch); }

/* Where the moments or sums of piece `number` of a batch are. */
static int64_t set_piece_offset(const RowJob *rows, int64_t batch, int64_t number) {
    return batch % BATCHES_IN_FLIGHT * rows->per_batch * rows->cut.pieces + number;
}

static void rows_piece_moments_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const RowJob *rows = job;
    rows_piece_moments(rows, batch * rows->per_batch + number / rows->cut.pieces, number % rows->cut.pieces, scratch,
                       rows->pieces + set_piece_offset(rows, batch, number));
}

static void rows_merge_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const RowJob *rows = job;
    (void)number, (void)scratch;
    for (int64_t set = 0; set < batch_sets(rows, batch); set++) {
        const Moments *pieces = rows->pieces + set_piece_offset(rows, batch, set * rows->cut.pieces);
        Moments all = {0.0, 0.0, 0.0};
        for (int64_t piece = 0; piece < rows->cut.pieces; piece++) all = merge_moments(all, pieces[piece], (int)rows->problem->centered);
        write_statistics(rows->problem, rows->tensors, batch * rows->per_batch + set, all);
    }
}

static void rows_normalize_piece_task(void *job, int64_t batch, int64_t number, void *scratch) {
    const RowJob *rows = job;
    RowBuffers *buffers = scratch;
    int64_t set = batch * rows->per_batch + number / rows->cut.pieces, piece = number % rows->cut.pieces;
    int64_t end = min(rows->cut.blocks, (piece + 1) * rows->cut.blocks_per_piece);
    affine_cache_clear(&buffers->affine);
    for (int64_t block = piece * rows->cut.blocks_per_piece; block < end; block++) rows_normalize_block(rows, set, block, buffers);
}

/* A stage with one task for each piece of a batch. */
static Stage set_pieces_stage(const RowJob *rows, StageTask task) {
    int64_t last = ceil_div(rows->sets, rows->per_batch) - 1;
    return (Stage){task, rows->per_batch * rows->cut.pieces, batch_sets(rows, last) * rows->cut.pieces};
}

/* Whether threads share sets: sets that are too large for a cache, or too few to give each thread one. */
static int rows_share_sets(const Problem *problem, int64_t max_size) {
    int64_t size = problem->reps * problem->run, sets = problem->outer * problem->sets;
    return size > max_size || (sets < 8 && size > PIECE_ELEMENTS / 4);
}

/* `direct`: nothing is converted in buffers of BLOCK elements, so blocks may be longer. */
static RowJob make_row_job(const Problem *problem, const Tensors *tensors, int direct) {
    int64_t segment = segment_length(problem);
    int uniform = segment >= 64 || segment == problem->run;
    SetCut cut = cut_set(problem, uniform ? segment : problem->run, uniform && direct ? 4 * BLOCK : BLOCK);
    return (RowJob){.problem = problem, .tensors = tensors, .cut = cut, .uniform = uniform, .sets = problem->outer * problem->sets};
}

/* How many sets, or samples, threads share at a time: few enough that the second pass finds them in a cache. */
static int64_t batch_size(int64_t bytes) { return max(1, (4 << 20) / max(1, bytes)); }

static int rows_forward(const Problem *problem, const Tensors *tensors, int64_t threads) {
    RowJob rows = make_row_job(problem, tensors, !problem->activation && !problem->residual_type);
    int64_t size = problem->reps * problem->run, scratch = aligned_size(sizeof(RowBuffers));
    int shared = !problem->given_statistics && rows_share_sets(problem, 1 << 17);
    rows.per_batch = min(rows.sets, batch_size(size * element_size(problem->type)));
    int64_t pieces = shared ? BATCHES_IN_FLIGHT * rows.per_batch * rows.cut.pieces : 0;
    char *memory = allocate_buffer(threads * scratch + pieces * (int64_t)sizeof(Moments));
    if (!memory) return 1;
    rows.pieces = (Moments *)(memory + threads * scratch);
    if (problem->given_statistics) {
        rows.per_task = max(1, MIN_PART_ELEMENTS / problem->run);
        run_parallel(rows_given_statistics_task, &rows, ceil_div(rows.sets * problem->reps, rows.per_task), threads, memory, scratch);
    } else if (!shared) {
        rows.per_task = max(1, MIN_PART_ELEMENTS / size);
        run_parallel(rows_whole_sets_task, &rows, ceil_div(rows.sets, rows.per_task), threads, memory, scratch);
    } else {
        BatchLoop loop = {.job = &rows, .scratch = memory, .scratch_size = scratch, .batches = ceil_div(rows.sets, rows.per_batch)};
        loop.stages[0] = set_pieces_stage(&rows, rows_piece_moments_task), loop.stages[1] = (Stage){rows_merge_task, 1, 1};
        if (tensors->y) loop.stages[2] = set_pieces_stage(&rows, rows_normalize_piece_task);
        run_batches(&loop, threads);
    }
    release_buffer(memory);
    return 0;
}
