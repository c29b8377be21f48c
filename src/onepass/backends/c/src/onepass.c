/* The CPU kernels of onepass, called by pointers from native.py. Equations cite docs/theory.md. */
#include "packs_backward.h"
#include "tiles_backward.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define EXPORT __attribute__((visibility("default")))

enum { LARGE = 4 << 20 }; /* bytes */

EXPORT void onepass_threads(Parallel parallel) { openmp = parallel; }

/* The parameters as floats, with what is added to them: as they lie, or in new memory, which `memory` names. Returns 1 where that is short. */
static int parameters(const Problem *p, Tensors *t, float **memory) {
    const void **from[4] = {&t->weight, &t->bias, &t->scale, &t->shift};
    int64_t types[4] = {p->weight, p->bias, p->scale, p->shift}, sizes[4] = {p->param.size, p->param.size, p->modulation.size, p->modulation.size};
    float added[4] = {(float)p->offset, 0.0f, 1.0f, 0.0f};
    int64_t total = 0;
    for (int i = 0; i < 4; i++) if (types[i] > F32 || (types[i] && added[i] != 0.0f)) total += sizes[i];
    *memory = total ? malloc((size_t)total * 4) : NULL;
    if (total && !*memory) return 1;
    float *to = *memory;
    for (int i = 0; i < 4; i++) if (types[i] > F32 || (types[i] && added[i] != 0.0f)) {
        load(to, *from[i], 0, sizes[i], types[i]);
        if (added[i] != 0.0f) for (int64_t k = 0; k < sizes[i]; k++) to[k] += added[i];
        *from[i] = to, to += sizes[i];
    }
    return 0;
}

/* A large new tensor in large pages, where the system has them for the asking: each page is a fault the first time. */
static void in_large_pages(void *memory, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    if (memory && bytes >= LARGE) {
        uintptr_t start = ((uintptr_t)memory + 4095) / 4096 * 4096, end = ((uintptr_t)memory + (uintptr_t)bytes) / 4096 * 4096;
        madvise((void *)start, end - start, MADV_HUGEPAGE);
    }
#else
    (void)memory, (void)bytes;
#endif
}

/* Statistics and y; without y, the statistics alone. Returns 0, or 1 where memory is short. */
EXPORT int onepass_forward(const Problem *p, const Tensors *given, int64_t threads) {
    Tensors t = *given;
    int64_t sets = p->outer * p->sets, bytes = p->outer * p->reps * width(p) * size_of(p->type);
    float *statistics = malloc((size_t)sets * 8), *params = NULL;
    int failed = !statistics || parameters(p, &t, &params);
    if (!failed) {
        if (!t.mean) t.mean = statistics, fill(statistics, 0.0f, sets);
        if (!t.rstd) t.rstd = statistics + sets;
        if (p->given) for (int64_t set = 0; set < sets; set++) t.rstd[set] = (float)(1.0 / sqrt(t.var[set] + p->eps));
        in_large_pages(t.y, bytes), in_large_pages(t.sum, bytes);
        failed = (p->tile ? tiles_forward : packs_fit(p) ? packs_forward : rows_forward)(p, &t, threads);
    }
    free(params), free(statistics);
    return failed;
}

/* The same, and the running statistics become (1 - momentum)·running + momentum·batch, (12), with the unbiased variance, (13). */
EXPORT int onepass_track(const Problem *p, const Tensors *given, int64_t threads, float *running_mean, float *running_var, double momentum) {
    Tensors t = *given;
    int64_t sets = p->outer * p->sets, count = p->reps * p->fold * p->run;
    float *statistics = malloc((size_t)sets * 8);
    if (!statistics) return 1;
    t.mean = statistics, t.var = statistics + sets;
    int failed = onepass_forward(p, &t, threads);
    double unbiased = (double)count / (double)larger(count - 1, 1);
    for (int64_t set = 0; set < sets && !failed; set++) {
        running_mean[set] = (float)((1.0 - momentum) * running_mean[set] + momentum * t.mean[set]);
        running_var[set] = (float)((1.0 - momentum) * running_var[set] + momentum * unbiased * t.var[set]);
    }
    free(statistics);
    return failed;
}

/* The gradients that have a place in t. c1 and c2 are kept where there is one; with `sums` 0 they are given, and dx alone is computed. */
EXPORT int onepass_backward(const Problem *p, const Tensors *given, int64_t threads, int64_t sums) {
    Tensors t = *given;
    int64_t sets = p->outer * p->sets;
    float *coefficients = malloc((size_t)sets * 12), *params = NULL;
    int failed = !coefficients || parameters(p, &t, &params);
    if (!failed) {
        if (!t.c1) {
            t.c1 = coefficients, t.c2 = coefficients + sets, fill(coefficients, 0.0f, 3 * sets);
            /* A set of one value is constant, and so is y: dx is 0, which wdy - c1 is not if either is rounded and the other not. */
            if (p->centered && !p->given && p->reps * p->fold * p->run == 1) t.rstd = coefficients + 2 * sets;
        }
        in_large_pages(t.dx, p->outer * p->reps * width(p) * size_of(p->type));
        failed = (p->tile ? tiles_backward : packs_fit(p) ? packs_backward : rows_backward)(p, &t, threads, (int)sums);
    }
    free(params), free(coefficients);
    return failed;
}
