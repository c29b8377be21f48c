/* The row walk for short sets, forward. A pack is several rows that the loops process in one call.

   So the rows share the cost of a call. */
#pragma once
#include "parameter_gradients.h"
#include "moments.h"

enum { MAX_PACK_RUN = LONG_BLOCK, PACK_ELEMENTS = LONG_BLOCK, MAX_PACK_ROWS = 256 };

typedef struct { const Problem *problem; const Tensors *tensors; Partials *partials; int64_t parts, per_task; int with_sums; } PackJob;

/* Whether packs fit the problem: a set is one short run, and the rows of a pack use the same parameters. */
static int rows_can_pack(const Problem *problem) {
    int by_sets = problem->sets > 1 &&
        ((has_affine(problem) && problem->param_map.c) || (has_modulation(problem) && problem->modulation_map.c));
    int by_samples = (has_affine(problem) && problem->param_map.a && problem->param_map.every == 1) ||
        (has_modulation(problem) && problem->modulation_map.a && problem->modulation_map.every == 1);
    return problem->reps == 1 && problem->run <= MAX_PACK_RUN && !by_sets && !(by_samples && problem->sets == 1);
}

/* Evenly spaced rows: rows of one sample, or, if a sample has one row, of samples that use the same parameters. */
typedef struct { int64_t o, s, rows, dense_start, x_start, row_stride; } Pack;

static Pack pack_at(const Problem *problem, int64_t row, int64_t end) {
    int64_t o = fast_div(row, problem->sets), s = row - o * problem->sets;
    int64_t rows = min(problem->run > BLOCK ? 1 : min(MAX_PACK_ROWS, PACK_ELEMENTS / problem->run), end - row);
    if (problem->sets > 1) rows = min(rows, problem->sets - s);
    else {
        if (has_affine(problem) && problem->param_map.a)
            rows = min(rows, (fast_div(o, problem->param_map.every) + 1) * problem->param_map.every - o);
        if (has_modulation(problem) && problem->modulation_map.a)
            rows = min(rows, (fast_div(o, problem->modulation_map.every) + 1) * problem->modulation_map.every - o);
    }
    return (Pack){o, s, rows, row * problem->run, o * problem->x_stride_o + s * problem->x_stride_s,
                  problem->sets > 1 ? problem->x_stride_s : problem->x_stride_o};
}

typedef struct {
    AffineCache affine;
    ALIGNED_FLOAT x[PACK_ELEMENTS];
    ALIGNED_FLOAT other[PACK_ELEMENTS];
    ALIGNED_FLOAT dy[PACK_ELEMENTS];
    ALIGNED_FLOAT dz[PACK_ELEMENTS];
    ALIGNED_FLOAT a[MAX_PACK_RUN + ARRAY_GAP];
    ALIGNED_FLOAT b[MAX_PACK_RUN + ARRAY_GAP];
    float mean[MAX_PACK_ROWS], rstd[MAX_PACK_ROWS], var[MAX_PACK_ROWS], zeros[MAX_PACK_ROWS];
    double means[MAX_PACK_ROWS], m2[MAX_PACK_ROWS];
} PackBuffers;

/* The rows of a pack as floats. `row_stride` becomes the distance of two rows of the result. */
static const float *pack_as_floats(const void *from, int64_t index, const Problem *problem, const Pack *pack, int64_t *row_stride,
                                   int64_t type, float *buffer) {
    if (type == F32) return (const float *)from + index;
    if (*row_stride == problem->run) load_floats(buffer, from, index, pack->rows * problem->run, type);
    else for (int64_t k = 0; k < pack->rows; k++) load_floats(buffer + k * problem->run, from, index + k * *row_stride, problem->run, type);
    *row_stride = problem->run;
    return buffer;
}

/* The rows as the kernels normalize them: x, or the sum with the residual, which is rounded and written. */
static TypedArray pack_input(const Problem *problem, const Tensors *tensors, const Pack *pack, int64_t *row_stride, PackBuffers *buffers) {
    int64_t n = pack->rows * problem->run;
    *row_stride = pack->row_stride;
    if (!problem->residual_type) return (TypedArray){element_at(tensors->x, pack->x_start, problem->x_type), problem->x_type};
    *row_stride = problem->run; /* with a residual, x is dense */
    load_floats(buffers->x, tensors->x, pack->dense_start, n, problem->x_type);
    add_to(buffers->x, floats_at(tensors->residual, pack->dense_start, n, problem->residual_type, buffers->other), n);
    store_floats(tensors->sum, pack->dense_start, buffers->x, n, problem->type);
    return (TypedArray){element_at(tensors->sum, pack->dense_start, problem->type), problem->type};
}

VECTOR_LOOP void pack_statistics(float *restrict mean, float *restrict var, float *restrict rstd, const double *restrict means,
                                 const double *restrict m2, double n, double eps, int64_t rows) {
    for (int64_t k = 0; k < rows; k++) statistics_from_moments(mean + k, var + k, rstd + k, (Moments){n, means[k], m2[k]}, eps);
}

static void packs_forward_task(void *job, int64_t number, void *scratch) {
    const PackJob *packs = job;
    const Problem *problem = packs->problem;
    const Tensors *tensors = packs->tensors;
    PackBuffers *buffers = scratch;
    int64_t end = min(problem->outer * problem->sets, (number + 1) * packs->per_task);
    affine_cache_clear(&buffers->affine);
    for (int64_t row = number * packs->per_task; row < end;) {
        Pack pack = pack_at(problem, row, end);
        int64_t row_stride, n = pack.rows * problem->run;
        TypedArray x = pack_input(problem, tensors, &pack, &row_stride, buffers);
        float *mean = tensors->mean + row, *rstd = tensors->rstd + row, *var = tensors->var ? tensors->var + row : buffers->var;
        prefetch(tensors->x, pack.x_start + pack.rows * pack.row_stride, min(n, (end - row - pack.rows) * problem->run), problem->x_type,
                 0);
        if (tensors->y) prefetch(tensors->y, pack.dense_start, n, problem->type, 1);
        if (!problem->given_statistics) {
            loops_for[x.type].row_moments(buffers->means, buffers->m2, x.data, row_stride, pack.rows, problem->run, (int)problem->centered,
                                          NULL);
            pack_statistics(mean, var, rstd, buffers->means, buffers->m2, (double)problem->run, problem->eps, pack.rows);
        }
        row += pack.rows;
        if (!tensors->y) continue;
        const AffineSlot *slot = affine_cache_get(&buffers->affine, problem, tensors, pack.o, 0, 0, problem->run);
        int direct = !problem->activation;
        const void *in = direct ? x.data : pack_as_floats(x.data, 0, problem, &pack, &row_stride, x.type, buffers->x);
        void *out = direct || problem->type == F32 ? mutable_element_at(tensors->y, pack.dense_start, problem->type) : buffers->other;
        loops_for[direct ? problem->type : F32].normalize_rows(out, in, row_stride, mean, rstd, slot->gain, slot->term, pack.rows,
                                                               problem->run);
        if (problem->activation) activate(tensors->y, pack.dense_start, out, n, problem->activation, problem->type);
    }
}

static int packs_forward(const Problem *problem, const Tensors *tensors, int64_t threads) {
    PackJob packs = {.problem = problem, .tensors = tensors, .per_task = max(1, MIN_PART_ELEMENTS / problem->run)};
    int64_t scratch = aligned_size(sizeof(PackBuffers));
    char *memory = allocate_buffer(threads * scratch);
    if (!memory) return 1;
    run_parallel(packs_forward_task, &packs, ceil_div(problem->outer * problem->sets, packs.per_task), threads, memory, scratch);
    release_buffer(memory);
    return 0;
}
