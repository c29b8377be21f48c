/* The problem: the view x[o, r, s, t] of theory.md, the parameter maps and the operands of a call.

   Problem and Tensors are packed by position in backends/c/problem.py: keep both in step.
   Here are also the functions that find elements and parameters for a place in the view.

   A row is all (s, t) of one (o, r), and j is a column of a row. With folding, a row repeats (s, t) several times.
   A set is one (o, s), and a sample is one o. */
#pragma once
#include "activations.h"

enum { BLOCK = 1024 };             /* elements of a block; several blocks fit the smallest first-level cache */
enum { LONG_BLOCK = 4096 };        /* elements of the longest block */
enum { AFFINE_SLOTS = 16 };        /* blocks of parameters in an AffineCache; a long block uses several slots */
enum { PIECE_ELEMENTS = 1 << 16 }; /* elements of a piece, when several threads share a set */

/* The parameter index (1). `size` is the number of parameters. */
typedef struct { int64_t every, period, a, b, c, channel_run, d, size; } ParamMap;

typedef struct {
    int64_t outer, reps, sets, run;
    int64_t x_stride_o, x_stride_r, x_stride_s; /* in elements; all other tensors of x's shape are dense */
    int64_t x_type, residual_type, type;        /* `type` is the element type of the sum, y, dy and dx */
    int64_t weight_type, bias_type, scale_type, shift_type;
    int64_t activation, centered;
    int64_t given_statistics;                   /* mean and var are inputs, not computed from x */
    int64_t from_y;                             /* in a backward, x holds y */
    int64_t tile;                               /* walk rows across their sets, see tiles.h */
    int64_t fold;                               /* narrow rows that are one row here; reps and x_stride_r are of such rows */
    double eps, weight_offset;
    ParamMap param_map, modulation_map;
} Problem;

typedef struct {
    const void *x, *residual;
    const void *weight, *bias, *scale, *shift; /* as floats, weight + offset and 1 + scale, after convert_parameters */
    float *mean, *rstd, *var;                  /* (outer, sets) each; NULL where the caller does not need one */
    void *y, *sum;                             /* sum is x + residual */
    const void *dy, *dsum;
    void *dx, *dweight, *dbias, *dscale, *dshift;
    float *c1, *c2;
} Tensors;

/* Zeros of every element type. They stand for x where dx does not depend on x. */
static const ALIGNED_FLOAT zero_block[LONG_BLOCK];

/* Columns of a row. */
static inline int64_t row_width(const Problem *problem) { return problem->fold * problem->sets * problem->run; }
static inline int64_t set_of_column(const Problem *problem, int64_t j) { return fast_mod(fast_div(j, problem->run), problem->sets); }
/* The index of column j of row (o, r) in a dense tensor. */
static inline int64_t dense_index(const Problem *problem, int64_t o, int64_t r, int64_t j) {
    return (o * problem->reps + r) * row_width(problem) + j;
}
/* The parameter index (1) of column 0 of row (o, r), without its terms in s and t. */
static inline int64_t map_base(const ParamMap *map, int64_t o, int64_t r) {
    return map->a ? fast_mod(fast_div(o, map->every), map->period) * map->a + r * map->b : r * map->b;
}

/* The parameter index (1) of column j of a row with this base. */
static inline int64_t map_index(const Problem *problem, const ParamMap *map, int64_t base, int64_t j) {
    return base + (map->c ? set_of_column(problem, j) * map->c : 0) +
           (map->d ? fast_div(fast_mod(j, problem->run), map->channel_run) * map->d : 0);
}

/* Whether consecutive columns use consecutive parameters, up to where a folded row repeats. */
static inline int is_consecutive_until_fold(const Problem *problem, const ParamMap *map) {
    if (problem->run == 1) return map->c == 1 || problem->sets == 1;
    return map->d == 1 && map->channel_run == 1 && (problem->sets == 1 || map->c == problem->run);
}
/* Whether that holds for the whole row. */
static inline int is_consecutive(const Problem *problem, const ParamMap *map) {
    return problem->fold == 1 && is_consecutive_until_fold(problem, map);
}
/* Whether all columns of a row use the same parameter. */
static inline int is_constant(const Problem *problem, const ParamMap *map) { return (problem->sets == 1 || !map->c) && !map->d; }
static inline int has_affine(const Problem *problem) { return problem->weight_type || problem->bias_type; }
static inline int has_modulation(const Problem *problem) { return problem->scale_type || problem->shift_type; }

/* A folded row repeats its first columns. It is never wider than a block. */
static inline int64_t unfolded_columns(const Problem *problem, int64_t n) { return min(n, problem->sets * problem->run); }
static void repeat_columns(float *to, int64_t first, int64_t n) {
    for (int64_t i = first; i < n; i += first) memcpy(to + i, to, (size_t)min(first, n - i) * 4);
}

/* One parameter for each of the columns j0 to j0 + n of a row. */
static void expand_parameters(float *restrict to, const float *restrict from, const Problem *problem, const ParamMap *map, int64_t base,
                              int64_t j0, int64_t n) {
    if (problem->fold > 1 && n > unfolded_columns(problem, n)) {
        expand_parameters(to, from, problem, map, base, 0, unfolded_columns(problem, n));
        repeat_columns(to, unfolded_columns(problem, n), n);
    } else if (is_constant(problem, map)) fill(to, from[base], n);
    else if (is_consecutive_until_fold(problem, map)) memcpy(to, from + base + j0, (size_t)n * 4);
    else {
        int64_t s = set_of_column(problem, j0), column = fast_mod(j0, problem->run), length = map->d ? map->channel_run : problem->run;
        int64_t channel = map->d ? fast_div(column, length) : 0, within = column - channel * length;
        for (int64_t i = 0; i < n; within = 0, channel++) {
            if (channel * length == problem->run) channel = 0, s = s + 1 == problem->sets ? 0 : s + 1;
            float value = from[base + s * map->c + channel * map->d];
            for (int64_t end = min(n, i + length - within); i < end; i++) to[i] = value;
        }
    }
}

/* gain and term of z = x_hat·gain + term, which is (5) and (31) together, for columns j0 to j0 + n of a row.
   They stay in the cache while rows use the same parameters. param and modulation identify those. */
typedef struct { const float *gain, *term; int64_t param, modulation, j0, n; } AffineSlot;

typedef struct {
    AffineSlot slots[AFFINE_SLOTS];
    ALIGNED_FLOAT gains[AFFINE_SLOTS * BLOCK];
    ALIGNED_FLOAT terms[AFFINE_SLOTS * BLOCK];
    ALIGNED_FLOAT buffer[LONG_BLOCK];
} AffineCache;

static void affine_cache_clear(AffineCache *affine) { for (int i = 0; i < AFFINE_SLOTS; i++) affine->slots[i].n = -1; }

static const AffineSlot *affine_cache_get(AffineCache *affine, const Problem *problem, const Tensors *tensors, int64_t o, int64_t r,
                                          int64_t j0, int64_t n) {
    int number = (int)(j0 / BLOCK % AFFINE_SLOTS);
    AffineSlot *slot = affine->slots + number;
    float *gains = affine->gains + number * BLOCK, *terms = affine->terms + number * BLOCK;
    int64_t param = map_base(&problem->param_map, o, r), modulation = map_base(&problem->modulation_map, o, r);
    if (slot->n == n && slot->j0 == j0 && slot->param == param && slot->modulation == modulation) return slot;
    slot->param = param, slot->modulation = modulation, slot->j0 = j0, slot->n = n;
    slot->gain = gains, slot->term = terms;
    int direct = !problem->scale_type && is_consecutive(problem, &problem->param_map);
    if (direct && problem->weight_type) slot->gain = (const float *)tensors->weight + param + j0;
    else if (problem->weight_type) expand_parameters(gains, tensors->weight, problem, &problem->param_map, param, j0, n);
    else fill(gains, 1.0f, n);
    if (direct && problem->bias_type && !problem->shift_type) slot->term = (const float *)tensors->bias + param + j0;
    else if (problem->bias_type) expand_parameters(terms, tensors->bias, problem, &problem->param_map, param, j0, n);
    else fill(terms, 0.0f, n);
    if (problem->scale_type) {
        expand_parameters(affine->buffer, tensors->scale, problem, &problem->modulation_map, modulation, j0, n);
        multiply_by(gains, affine->buffer, n);
        multiply_by(terms, affine->buffer, n);
    }
    if (problem->shift_type) {
        expand_parameters(affine->buffer, tensors->shift, problem, &problem->modulation_map, modulation, j0, n);
        add_to(terms, affine->buffer, n);
    }
    return slot;
}

/* gain and term of column j, for all columns that share its parameters. */
static inline void uniform_affine(const Problem *problem, const Tensors *tensors, int64_t o, int64_t r, int64_t j, float *gain,
                                  float *term) {
    int64_t param = map_index(problem, &problem->param_map, map_base(&problem->param_map, o, r), j);
    int64_t modulation = map_index(problem, &problem->modulation_map, map_base(&problem->modulation_map, o, r), j);
    *gain = problem->weight_type ? ((const float *)tensors->weight)[param] : 1.0f;
    *term = problem->bias_type ? ((const float *)tensors->bias)[param] : 0.0f;
    if (problem->scale_type) *gain *= ((const float *)tensors->scale)[modulation], *term *= ((const float *)tensors->scale)[modulation];
    if (problem->shift_type) *term += ((const float *)tensors->shift)[modulation];
}

/* The length of a segment: columns of a run that share all their parameters.
   Segments of weight and bias and of the modulation may differ; their greatest common divisor fits both. */
static int64_t segment_length(const Problem *problem) {
    int64_t segment = has_affine(problem) && problem->param_map.d ? problem->param_map.channel_run : problem->run;
    int64_t other = has_modulation(problem) && problem->modulation_map.d ? problem->modulation_map.channel_run : problem->run;
    while (other) { int64_t rest = segment % other; segment = other, other = rest; }
    return segment;
}

/* The index in x of column j0 of row (o, r). */
static inline int64_t x_index(const Problem *problem, int64_t o, int64_t r, int64_t j0) {
    return o * problem->x_stride_o + r * problem->x_stride_r +
           (problem->sets == 1 || problem->x_stride_s == problem->run
                ? j0
                : fast_div(j0, problem->run) * problem->x_stride_s + fast_mod(j0, problem->run));
}

/* Consecutive elements of one type. */
typedef struct { const void *data; int64_t type; } TypedArray;

static const float *array_as_floats(TypedArray x, int64_t n, float *buffer) { return floats_at(x.data, 0, n, x.type, buffer); }

/* Columns j0 to j0 + n of a row, as the kernels normalize them: x, or the sum with the residual.
   The first pass computes the sum, rounds it and writes it. */
static TypedArray norm_input(const Problem *problem, const Tensors *tensors, int64_t o, int64_t r, int64_t j0, int64_t n, int first,
                             float *buffer) {
    int64_t index = dense_index(problem, o, r, j0);
    if (!problem->residual_type) return (TypedArray){element_at(tensors->x, x_index(problem, o, r, j0), problem->x_type), problem->x_type};
    if (!first) return (TypedArray){element_at(tensors->sum, index, problem->type), problem->type};
    ALIGNED_FLOAT other[BLOCK];
    load_floats(buffer, tensors->x, x_index(problem, o, r, j0), n, problem->x_type);
    add_to(buffer, floats_at(tensors->residual, index, n, problem->residual_type, other), n);
    store_floats(tensors->sum, index, buffer, n, problem->type);
    return (TypedArray){element_at(tensors->sum, index, problem->type), problem->type};
}

/* The operands of a loop that computes y. If `direct`, it reads and writes elements of the problem's type.
   Otherwise it works on floats, and another step converts its result. */
typedef struct { int64_t type; const void *x; void *out; } LoopOperands;

static LoopOperands loop_operands(const Problem *problem, int direct, TypedArray x, void *to, int64_t index, int64_t n, float *in,
                                  float *out) {
    if (direct && x.type == problem->type) return (LoopOperands){problem->type, x.data, mutable_element_at(to, index, problem->type)};
    return (LoopOperands){F32, array_as_floats(x, n, in), problem->type == F32 ? mutable_element_at(to, index, F32) : out};
}
