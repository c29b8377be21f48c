/* Work in several stages, batch by batch, in one parallel region.

   A batch is a few sets or samples, so few that they stay in a cache from the first stage to the last. A stage of a batch
   starts when all tasks of the stage before have ended. Threads do not wait for that. Meanwhile they take tasks of the
   next batches. So if the system interrupts a thread to run another process, the other threads can go on. */
#pragma once
#include <sched.h>
#include <time.h>
#include "numbers.h"
#include "parallel.h"

#define STAGES 3
enum { BATCHES_IN_FLIGHT = 4, MAX_LANES = 64 };
static const int64_t SPINS = 2000, NAP_NANOSECONDS = 20000; /* a thread without a task spins for some microseconds, then naps */

/* A task may use slot batch % BATCHES_IN_FLIGHT of a buffer. The earlier batch that used this slot has ended. */
typedef void (*StageTask)(void *job, int64_t batch, int64_t number, void *scratch);

/* The last batch may be smaller and have fewer tasks. A stage without tasks is skipped. */
typedef struct { StageTask task; int64_t count, last_count; } Stage;

typedef struct { int64_t stage, taken, done; uint64_t lanes; } BatchState; /* `lanes`: bit i says that task i was taken */

typedef struct {
    Stage stages[STAGES];
    void *job, *scratch;
    int64_t batches, scratch_size;
    int ordered; /* first stage only: task i waits for task i of the batch before. Both add to the same sums, lane i */
    atomic_flag lock;
    atomic_llong worker, progress;
    int64_t oldest; /* the first batch that has not ended */
    int64_t lane_batches[MAX_LANES]; /* if ordered: the batch whose task comes next in each lane */
    BatchState states[BATCHES_IN_FLIGHT];
} BatchLoop;

typedef struct { int64_t batch, stage, number; } BatchTask; /* batch -1: no task can start now; -2: all tasks were taken */

static void lock_batches(BatchLoop *loop) {
    while (atomic_flag_test_and_set_explicit(&loop->lock, memory_order_acquire)) sched_yield();
}
static void unlock_batches(BatchLoop *loop) { atomic_flag_clear_explicit(&loop->lock, memory_order_release); }

static int64_t stage_count(const BatchLoop *loop, int64_t batch, int64_t stage) {
    return batch == loop->batches - 1 ? loop->stages[stage].last_count : loop->stages[stage].count;
}

static void enter_stage(BatchLoop *loop, int64_t batch, int64_t stage) {
    while (stage < STAGES && !stage_count(loop, batch, stage)) stage++;
    loop->states[batch % BATCHES_IN_FLIGHT] = (BatchState){stage, 0, 0, 0};
}

/* The number of a task of the batch's stage that can start now, or -1. */
static int64_t take_number(BatchLoop *loop, int64_t batch, BatchState *state, int64_t count) {
    if (state->taken == count) return -1;
    if (state->stage || !loop->ordered) return state->taken++;
    for (int64_t lane = 0; lane < count; lane++) if (!(state->lanes >> lane & 1) && loop->lane_batches[lane] == batch) {
        state->lanes |= (uint64_t)1 << lane, state->taken++;
        return lane;
    }
    return -1;
}

/* Prefer old batches: they are in the cache. */
static BatchTask take_task(BatchLoop *loop) {
    int all_taken = 1;
    int64_t end = min(loop->batches, loop->oldest + BATCHES_IN_FLIGHT);
    for (int64_t batch = loop->oldest; batch < end; batch++) {
        BatchState *state = loop->states + batch % BATCHES_IN_FLIGHT;
        if (state->stage == STAGES) continue;
        int64_t count = stage_count(loop, batch, state->stage), number = take_number(loop, batch, state, count), last = state->stage + 1;
        if (number >= 0) return (BatchTask){batch, state->stage, number};
        while (last < STAGES && !stage_count(loop, batch, last)) last++;
        all_taken &= last == STAGES && state->taken == count;
    }
    return (BatchTask){all_taken && end == loop->batches ? -2 : -1, 0, 0};
}

static void finish_task(BatchLoop *loop, BatchTask task) {
    BatchState *state = loop->states + task.batch % BATCHES_IN_FLIGHT;
    if (loop->ordered && !task.stage) loop->lane_batches[task.number]++;
    if (++state->done == stage_count(loop, task.batch, task.stage)) enter_stage(loop, task.batch, task.stage + 1);
    while (loop->oldest < loop->batches && loop->states[loop->oldest % BATCHES_IN_FLIGHT].stage == STAGES) {
        if (loop->oldest + BATCHES_IN_FLIGHT < loop->batches) enter_stage(loop, loop->oldest + BATCHES_IN_FLIGHT, 0);
        loop->oldest++;
    }
    atomic_fetch_add_explicit(&loop->progress, 1, memory_order_relaxed);
}

/* Wait until another thread has finished a task: then `progress` is not `seen` any more.
   A nap lets the system move an interrupted thread to this core. */
static void wait_for_progress(BatchLoop *loop, int64_t seen) {
    for (int64_t spins = 0; atomic_load_explicit(&loop->progress, memory_order_relaxed) == seen; spins++)
        if (spins >= SPINS) nanosleep(&(struct timespec){0, NAP_NANOSECONDS}, NULL);
}

static void run_batch_tasks(void *argument) {
    BatchLoop *loop = argument;
    void *scratch = (char *)loop->scratch + atomic_fetch_add(&loop->worker, 1) * loop->scratch_size;
    lock_batches(loop);
    for (;;) {
        BatchTask task = take_task(loop);
        int64_t seen = atomic_load_explicit(&loop->progress, memory_order_relaxed);
        unlock_batches(loop);
        if (task.batch == -2) return;
        if (task.batch == -1) wait_for_progress(loop, seen);
        else loop->stages[task.stage].task(loop->job, task.batch, task.number, scratch);
        lock_batches(loop);
        if (task.batch >= 0) finish_task(loop, task);
    }
}

/* Run all stages of all batches. `scratch` has `scratch_size` bytes for each thread. */
static void run_batches(BatchLoop *loop, int64_t threads) {
    loop->lock = (atomic_flag)ATOMIC_FLAG_INIT;
    for (int64_t batch = 0; batch < min(loop->batches, BATCHES_IN_FLIGHT); batch++) enter_stage(loop, batch, 0);
    while (loop->oldest < loop->batches && loop->states[loop->oldest % BATCHES_IN_FLIGHT].stage == STAGES) loop->oldest++;
    if (threads > 1 && openmp_parallel) openmp_parallel(run_batch_tasks, loop, (unsigned)threads, 0);
    else run_batch_tasks(loop);
}
