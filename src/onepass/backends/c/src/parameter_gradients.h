/* Gradients of weight, bias, scale and shift: sums over many sets.

   The work is cut into parts, whose number depends only on the problem. Each part has partial sums of its own,
   in double, for the parameters that it uses. At the end the parts are added up in order.
   So the results do not depend on the number of threads. */
#pragma once
#include "batches.h"
#include "moments.h"

enum { MAX_PARTS = 64, MIN_PART_ELEMENTS = 1 << 15 };
enum { SMALL_REDUCTION = 1 << 17 }; /* one thread adds up fewer partial sums than this */
enum { ROWS_PER_FLUSH = 32 }; /* after this many rows, sums of floats are added to the partial sums in double */
enum { ARRAY_GAP = 96 };      /* elements between arrays: accesses whose last 12 address bits agree delay each other */

/* The partial sums of one part. The ranges are of weight and bias, and of scale and shift.
   `which` numbers the gradients: 0 weight, 1 bias, 2 scale, 3 shift. Sums are NULL if that gradient is not needed. */
typedef struct { int64_t start, count; } Range;
typedef struct { Range range[2]; double *sums[4]; } Partials;

static inline const ParamMap *param_map_of(const Problem *problem, int which) {
    return which < 2 ? &problem->param_map : &problem->modulation_map;
}

static inline void *parameter_gradient(const Tensors *tensors, int which) {
    return which == 0 ? tensors->dweight : which == 1 ? tensors->dbias : which == 2 ? tensors->dscale : tensors->dshift;
}

static inline int any_parameter_gradient(const Tensors *tensors) {
    return tensors->dweight || tensors->dbias || tensors->dscale || tensors->dshift;
}

/* The parameters that the samples o0 to o1 use. */
static Range parameters_of_samples(const Problem *problem, const ParamMap *map, int64_t o0, int64_t o1) {
    int64_t first = o0 / map->every, last = (o1 - 1) / map->every;
    if (!map->a || last / map->period != first / map->period) return (Range){0, map->size};
    int64_t inside = (problem->reps - 1) * map->b + (problem->sets - 1) * map->c + (problem->run - 1) / map->channel_run * map->d + 1;
    return (Range){first % map->period * map->a, (last - first) * map->a + inside};
}

static int64_t partials_bytes(const Tensors *tensors, const Range *range) {
    int64_t count = 0;
    for (int which = 0; which < 4; which++) if (parameter_gradient(tensors, which)) count += range[which / 2].count;
    return aligned_size(count * 8);
}

/* Set the ranges of a part with the samples o0 to o1. Returns the bytes that its sums need. */
static int64_t partials_plan(Partials *partials, const Problem *problem, const Tensors *tensors, int64_t o0, int64_t o1) {
    for (int k = 0; k < 2; k++) partials->range[k] = parameters_of_samples(problem, param_map_of(problem, 2 * k), o0, o1);
    return partials_bytes(tensors, partials->range);
}

/* Parts have enough elements to be worth a task, and few enough partial sums to be small beside the elements. */
static int64_t part_count(const Problem *problem, const Tensors *tensors) {
    Range ranges[2] = {{0, problem->param_map.size}, {0, problem->modulation_map.size}};
    int64_t total = problem->outer * problem->reps * row_width(problem), partials = max(1, partials_bytes(tensors, ranges) / 8);
    return max(1, min(MAX_PARTS, min(total / MIN_PART_ELEMENTS, max(2, total / (16 * partials)))));
}

/* Set all sums to 0. `memory` has the bytes that partials_plan returned. */
static void partials_clear(Partials *partials, const Tensors *tensors, double *memory) {
    for (int which = 0; which < 4; which++) {
        Range range = partials->range[which / 2];
        partials->sums[which] = parameter_gradient(tensors, which) ? memory - range.start : NULL;
        if (parameter_gradient(tensors, which)) memset(memory, 0, (size_t)range.count * 8), memory += range.count;
    }
}

/* Add a = Σ dz·x_hat and b = Σ dz of elements that share their parameters, by (40). */
static inline void partials_add(const Partials *partials, const Problem *problem, const Tensors *tensors, int64_t param, int64_t modulation,
                                double a, double b) {
    double g = problem->scale_type ? ((const float *)tensors->scale)[modulation] : 1.0;
    double w = problem->weight_type ? ((const float *)tensors->weight)[param] : 1.0;
    double bias = problem->bias_type ? ((const float *)tensors->bias)[param] : 0.0;
    if (partials->sums[0]) partials->sums[0][param] += g * a;
    if (partials->sums[1]) partials->sums[1][param] += g * b;
    if (partials->sums[2]) partials->sums[2][modulation] += w * a + bias * b;
    if (partials->sums[3]) partials->sums[3][modulation] += b;
}

/* The number of columns, from j on, that use the same parameter as j. */
static inline int64_t columns_left_in_segment(const Problem *problem, const ParamMap *map, int64_t j) {
    int64_t column = fast_mod(j, problem->run);
    return map->d ? map->channel_run - fast_mod(column, map->channel_run) : problem->run - column;
}

/* As partials_add, for columns j0 to j0 + n of a row, with one a and one b for each column. */
static void partials_add_columns(const Partials *partials, const Problem *problem, const Tensors *tensors, int64_t o, int64_t r, int64_t j0,
                                 int64_t n, const float *restrict a, const float *restrict b) {
    int64_t param = map_base(&problem->param_map, o, r), modulation = map_base(&problem->modulation_map, o, r);
    int64_t first = unfolded_columns(problem, n);
    ALIGNED_FLOAT sums[2][BLOCK];
    if (problem->fold > 1 && n > first) {
        fill(sums[0], 0.0f, first), fill(sums[1], 0.0f, first);
        for (int64_t i = 0; i < n; i += first) add_to(sums[0], a + i, first), add_to(sums[1], b + i, first);
        a = sums[0], b = sums[1], n = first;
    }
    if (!has_modulation(problem) && is_consecutive_until_fold(problem, &problem->param_map)) {
        if (partials->sums[0]) add_to_doubles(partials->sums[0] + param + j0, a, n);
        if (partials->sums[1]) add_to_doubles(partials->sums[1] + param + j0, b, n);
    } else for (int64_t i = 0; i < n;) {
        int64_t j = j0 + i;
        int64_t end = min(n, i + min(columns_left_in_segment(problem, &problem->param_map, j),
                                     columns_left_in_segment(problem, &problem->modulation_map, j)));
        double sum_a = 0.0, sum_b = 0.0;
        for (; i < end; i++) sum_a += a[i], sum_b += b[i];
        partials_add(partials, problem, tensors, map_index(problem, &problem->param_map, param, j),
                     map_index(problem, &problem->modulation_map, modulation, j), sum_a, sum_b);
    }
}

typedef struct { const Problem *problem; const Tensors *tensors; const Partials *partials; int64_t parts, chunks[4]; } PartialsReduction;

/* Add up one chunk of one gradient over all parts, and write it. */
static void reduce_partials_task(void *job, int64_t number, void *scratch) {
    const PartialsReduction *reduction = job;
    int which = 0;
    for (; number >= reduction->chunks[which]; which++) number -= reduction->chunks[which];
    const Problem *problem = reduction->problem;
    int64_t types[4] = {problem->weight_type, problem->bias_type, problem->scale_type, problem->shift_type};
    int64_t start = number * BLOCK, end = min(start + BLOCK, param_map_of(problem, which)->size);
    double sum[BLOCK];
    float rounded[BLOCK];
    (void)scratch;
    for (int64_t i = 0; i < end - start; i++) sum[i] = 0.0;
    for (int64_t part = 0; part < reduction->parts; part++) {
        const Partials *partials = reduction->partials + part;
        Range range = partials->range[which / 2];
        int64_t from = max(start, range.start), to = min(end, range.start + range.count);
        for (int64_t i = from; i < to; i++) sum[i - start] += partials->sums[which][i];
    }
    for (int64_t i = 0; i < end - start; i++) rounded[i] = (float)sum[i];
    store_floats(parameter_gradient(reduction->tensors, which), start, rounded, end - start, types[which]);
}

static void partials_reduce(const Problem *problem, const Tensors *tensors, const Partials *partials, int64_t parts, int64_t threads) {
    PartialsReduction reduction = {problem, tensors, partials, parts, {0}};
    int64_t tasks = 0;
    for (int which = 0; which < 4; which++) {
        reduction.chunks[which] = parameter_gradient(tensors, which) ? ceil_div(param_map_of(problem, which)->size, BLOCK) : 0;
        tasks += reduction.chunks[which];
    }
    /* A parallel region costs more than a small reduction. */
    run_parallel(reduce_partials_task, &reduction, tasks, parts * tasks * BLOCK < SMALL_REDUCTION ? 1 : threads, NULL, 0);
}
