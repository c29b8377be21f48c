/* The functions that Python calls: forward, forward with running statistics, backward.

   Each prepares the operands and chooses a walk: tiles, packs or rows.
   Numbers in parentheses, here and in the headers, are equations of docs/theory.md. */
#include "packs_backward.h"
#include "tiles_backward.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { LARGE_BYTES = 4 << 20 }; /* tensors from this size on use large pages */

/* Set the function that starts threads. */
EXPORT void onepass_threads(ParallelFunction parallel) { openmp_parallel = parallel; }

/* Replace the parameters by floats: weight + offset, bias, 1 + scale, shift. Those that change go to new memory,
   which the caller frees. Returns 1 if there is no memory. */
static int convert_parameters(const Problem *problem, Tensors *tensors, float **memory) {
    const void **from[4] = {&tensors->weight, &tensors->bias, &tensors->scale, &tensors->shift};
    int64_t types[4] = {problem->weight_type, problem->bias_type, problem->scale_type, problem->shift_type};
    int64_t sizes[4] = {problem->param_map.size, problem->param_map.size, problem->modulation_map.size, problem->modulation_map.size};
    float added[4] = {(float)problem->weight_offset, 0.0f, 1.0f, 0.0f};
    int64_t total = 0;
    for (int i = 0; i < 4; i++) if (types[i] > F32 || (types[i] && added[i] != 0.0f)) total += sizes[i];
    *memory = total ? malloc((size_t)total * 4) : NULL;
    if (total && !*memory) return 1;
    float *to = *memory;
    for (int i = 0; i < 4; i++) if (types[i] > F32 || (types[i] && added[i] != 0.0f)) {
        load_floats(to, *from[i], 0, sizes[i], types[i]);
        if (added[i] != 0.0f) for (int64_t k = 0; k < sizes[i]; k++) to[k] += added[i];
        *from[i] = to, to += sizes[i];
    }
    return 0;
}

/* Ask the system for large pages for a large new tensor: each page costs a page fault at its first use. */
static void request_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory && bytes >= LARGE_BYTES) {
        uintptr_t start = ((uintptr_t)memory + 4095) / 4096 * 4096, end = ((uintptr_t)memory + (uintptr_t)bytes) / 4096 * 4096;
        madvise((void *)start, end - start, MADV_HUGEPAGE);
    }
#else
    (void)memory, (void)bytes;
#endif
}

/* Computes the statistics and y, or only the statistics if y is NULL. Returns 0, or 1 if there is no memory. */
EXPORT int onepass_forward(const Problem *problem, const Tensors *given, int64_t threads) {
    Tensors tensors = *given;
    int64_t sets = problem->outer * problem->sets;
    int64_t bytes = problem->outer * problem->reps * row_width(problem) * element_size(problem->type);
    float *statistics = malloc((size_t)sets * 8), *params = NULL;
    int failed = !statistics || convert_parameters(problem, &tensors, &params);
    if (!failed) {
        if (!tensors.mean) tensors.mean = statistics, fill(statistics, 0.0f, sets);
        if (!tensors.rstd) tensors.rstd = statistics + sets;
        if (problem->given_statistics) for (int64_t set = 0; set < sets; set++)
            tensors.rstd[set] = (float)(1.0 / sqrt(tensors.var[set] + problem->eps));
        request_large_pages(tensors.y, bytes), request_large_pages(tensors.sum, bytes);
        int (*walk)(const Problem *, const Tensors *, int64_t) =
            problem->tile ? tiles_forward : rows_can_pack(problem) ? packs_forward : rows_forward;
        failed = walk(problem, &tensors, threads);
    }
    free(params), free(statistics);
    return failed;
}

/* As onepass_forward. It also updates the running statistics by (12), with the unbiased variance (13). */
EXPORT int onepass_track(const Problem *problem, const Tensors *given, int64_t threads, float *running_mean, float *running_var,
                         double momentum) {
    Tensors tensors = *given;
    int64_t sets = problem->outer * problem->sets, count = problem->reps * problem->fold * problem->run;
    float *statistics = malloc((size_t)sets * 8);
    if (!statistics) return 1;
    if (!tensors.mean) tensors.mean = statistics;
    tensors.var = statistics + sets;
    int failed = onepass_forward(problem, &tensors, threads);
    double unbiased = (double)count / (double)max(count - 1, 1);
    for (int64_t set = 0; set < sets && !failed; set++) {
        running_mean[set] = (float)((1.0 - momentum) * running_mean[set] + momentum * tensors.mean[set]);
        running_var[set] = (float)((1.0 - momentum) * running_var[set] + momentum * unbiased * tensors.var[set]);
    }
    free(statistics);
    return failed;
}

/* Computes the gradients that are not NULL, and c1 and c2.
   If `with_sums` is 0, c1 and c2 are given, and only dx is computed. */
EXPORT int onepass_backward(const Problem *problem, const Tensors *given, int64_t threads, int64_t with_sums) {
    Tensors tensors = *given;
    int64_t sets = problem->outer * problem->sets;
    float *coefficients = malloc((size_t)sets * 12), *params = NULL;
    int failed = !coefficients || convert_parameters(problem, &tensors, &params);
    if (!failed) {
        if (!tensors.c1) {
            tensors.c1 = coefficients, tensors.c2 = coefficients + sets, fill(coefficients, 0.0f, 3 * sets);
            /* A set of one value is constant, so dx is 0. wdy - c1 may differ from 0, if only one of them is rounded.
               With an rstd of 0, dx is 0 in any case. */
            if (problem->centered && !problem->given_statistics && problem->reps * problem->fold * problem->run == 1)
                tensors.rstd = coefficients + 2 * sets;
        }
        request_large_pages(tensors.dx, problem->outer * problem->reps * row_width(problem) * element_size(problem->type));
        int (*walk)(const Problem *, const Tensors *, int64_t, int) =
            problem->tile ? tiles_backward : rows_can_pack(problem) ? packs_backward : rows_backward;
        failed = walk(problem, &tensors, threads, (int)with_sums);
    }
    free(params), free(coefficients);
    return failed;
}
