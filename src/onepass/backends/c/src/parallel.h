/* Work for several threads: tasks are numbered, and whoever is free takes the next. A task's result depends on its number alone. */
#pragma once
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

/* GOMP_parallel of the OpenMP runtime that torch has loaded: the same threads work for torch and for us. NULL: one thread. */
typedef void (*Parallel)(void (*)(void *), void *, unsigned, unsigned);
static Parallel openmp;

typedef void (*Task)(void *job, int64_t number, void *scratch);
typedef struct { Task task; void *job, *scratch; int64_t count, scratch_size; atomic_llong next, worker; } Loop;

static void work(void *argument) {
    Loop *loop = argument;
    void *scratch = (char *)loop->scratch + atomic_fetch_add(&loop->worker, 1) * loop->scratch_size;
    for (int64_t i; (i = atomic_fetch_add(&loop->next, 1)) < loop->count;) loop->task(loop->job, i, scratch);
}

/* `scratch` has `scratch_size` bytes for each thread. The whole team is asked for: to ask for fewer would end the others' threads. */
static void each(Task task, void *job, int64_t count, int64_t threads, void *scratch, int64_t scratch_size) {
    Loop loop = {task, job, scratch, count, scratch_size, 0, 0};
    if (threads > 1 && count > 1 && openmp) openmp(work, &loop, (unsigned)threads, 0);
    else work(&loop);
}

/* Memory for strips: vectors should not lie across the lines of a cache. */
static inline int64_t aligned(int64_t bytes) { return (bytes + 127) / 128 * 128; }

/* One buffer is kept for the next call: new memory would cost as much as a small norm. Whoever finds it gone allocates. */
typedef struct { int64_t size; } Header;
enum { HEADER = 128, SPARE = 4 << 20 }; /* bytes; no larger one is kept */
static _Atomic(Header *) spare;

static void *buffers(int64_t bytes) {
    Header *header = atomic_exchange(&spare, NULL);
    if (!header || header->size < bytes) {
        free(header);
        header = aligned_alloc(HEADER, (size_t)(HEADER + aligned(bytes)));
        if (!header) return NULL;
        header->size = bytes;
    }
    return (char *)header + HEADER;
}

static void release(void *memory) {
    Header *header = memory ? (Header *)((char *)memory - HEADER) : NULL;
    free(header && header->size <= SPARE ? atomic_exchange(&spare, header) : header);
}
