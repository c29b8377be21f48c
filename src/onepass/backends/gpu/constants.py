"""The measured constants of the cost models, by which the planner compares families: one file for all of them.

A model gives the time of a launch in microseconds. cost.py has the model of `row`, `tile`, `apply`, `row_reread` and `tile_reread`: their
time follows from the bytes they move. The schedule.py of `team`, `ring` and `whole_set` has the model of that family: their programs form
teams, whose members share a unit of work, one or more sets. Only the order of the costs matters, so all may be too long by the same
factor. They are between 0.9 and 1.6 of the times that are measured on an H200, if a family is close to the fastest.

Unless a comment says otherwise, the constants are from an H200, 2026-11-15 and 2026-11-16. `python -m benchmarks.fit` measures launches
of `ring` and `whole_set`, on this GPU or another, and fits most of RING_*, RUN_* and WHOLE_* to them. `python -m benchmarks.sweep` measures
all families on random problems, and `python -m benchmarks.fit_choices` fits the factors between families to these times.
"""

# All families.
LAUNCH = 3.0  # for a launch
START = 4.3  # before the first load arrives and after the last store; in the model of `whole_set`, WHOLE_LAUNCH includes it
BANDWIDTH = 3e6  # bytes per microsecond
FEW_PROGRAMS = 1.1  # a multiprocessor reads this many times as fast as its share of the bandwidth if others are idle
FEW_SHORT = 4.0  # the same, for sets whose loads are all under way at once (`many_loads` of cost.py)
SHARE_OF_L2 = 0.32  # the fraction of the L2 cache that can hold x, because y passes through the cache too

# The speeds below are factors of BANDWIDTH in a forward. They make the choices good that sweeps measured: 1145 problems, H200, 2026-11-19.
SPEED = {"row": 0.9, "row_reread": 1.06, "tile": 0.84, "tile_reread": 1.42, "team": 0.75}  # 1 for other families
UNALIGNED_REREAD = {2: 0.61, 4: 0.92}  # `row_reread`: of long runs whose elements are loaded 2 or 4 bytes at a time
LONG_ROW_PEELED = 0.9  # `row`: of more than 8192 elements, whose ends are peeled off
UNALIGNED_LONG_ROW = 0.5  # `row`: of 16-bit rows of more than 8192 elements that are loaded 2 or 4 bytes at a time
NARROW_COLUMNS = 0.6  # `tile`: a block has less than 64 bytes of a row
ROW_START = 2.0  # `row`: instead of START, for the sets of FEW_SHORT
GATHERED_ONE_BY_ONE = 0.39  # `row`: gathered elements of 16 bits are loaded 2 or 4 bytes at a time
DIVISION = {2: 0.31, 4: 0.55}  # `row`: each element finds its parameters by a division
DIVISION_ODD = 0.5  # the same, at an odd address
# `row`: rows of more than 16384 elements, if there is a mean to subtract, and without; with an activation. With a mean: in two blocks, from
# 8193 elements.
LONG_ROW, LONG_ROW_WITHOUT_MEAN, LONG_ROW_ACTIVATION, LONG_ROW_IN_TWO = 0.92, 1.3, 0.55, 0.62
WIDE_ROW = 1.12  # `row`: rows of 4097 to 8192 elements of float32, with a mean
AT_ONCE_WITHOUT_MEAN = 1.5  # `row`: rows without a mean that `loads_row_at_once` of launches.py names
ROW_WITHOUT_MEAN = 1.3  # `row`: there is no mean to subtract, and a row is one block of up to 8192 elements
REREAD_ACTIVATION = 0.97  # `row_reread`: an activation, of 16-bit elements
REREAD_CHANNELS = 0.35  # `row_reread`: each channel is a run of its own, and no whole vectors
REREAD_ODD_CHANNELS = 0.7  # the same, at an odd address
REREAD_RUNS = 0.89  # `row_reread`: sets of several runs
REREAD_SHORT_RUNS = 0.6  # `row_reread`: besides, runs of less than 16 bytes
REREAD_ODD_RUNS = {2: 0.6, 4: 0.75}  # `row_reread`: besides, an odd address; runs of 16-bit elements have up to 1024 of them
REREAD_GELU = 0.6  # `row_reread`: gelu of long runs of 16-bit elements that are loaded one by one
REREAD_GELU_RUNS = 0.85  # `row_reread`: besides several runs, gelu of 16-bit elements at a multiple of 16 bytes
REREAD_PEELED = 0.79  # `row_reread`: the ends of runs are peeled off, and each element has parameters of its own
REREAD_AT_ONCE = {2: 0.77, 4: 0.75}  # `row_reread` in one launch, whose programs wait between reducing and applying a set
TILE_BY_ROW = 0.6  # `tile_reread`: each row has parameters of its own
WIDENED_TILE = 0.77  # `tile_reread`: several rows lie side by side in a block, with elements of 16 bits
TILE_GELU = 0.7  # `tile_reread`: gelu of 16-bit elements at a multiple of 16 bytes
NARROW_TILE = 0.52  # `tile_reread`: rows have less than 16 bytes, so a thread cannot load 16 bytes of one

# An x at an odd address. ODD_SPEED are further factors where x is loaded element by element.
COPY_START = 1.5  # to copy x first
COPY_RATE = {2: 1.4e6, 4: 1.5e6}  # bytes of x per microsecond, by the size of an element
ODD_SPEED = {"row_reread": {2: 1.45, 4: 1.27}, "tile": {2: 0.68}, "tile_reread": {2: 0.37, 4: 0.71}}

# Factors of BANDWIDTH in a backward, where a sweep of 210 problems was far from the model (H200, 2026-11-20).
BACK_TILE_WALK = 0.65  # `tile`: sets of several columns, elements of 16 bits
BACK_ROW_IN_TWO = 0.85  # `row`: two programs share a row of more than 8192 elements, with a mean to subtract
BACK_UNALIGNED = {"row": {4: 0.55}, "row_reread": {2: 0.8, 4: 0.8}, "tile_reread": {2: 0.45, 4: 0.35}, "tile": {2: 0.6}}  # odd address
BACK_ODD_RUNS = {"row": 0.7, "row_reread": 0.75, "tile": 0.65}  # runs of up to 1024 elements, not all at multiples of 8 bytes
BACK_REREAD_GELU, BACK_UNALIGNED_GELU = 0.55, 0.35  # `row_reread`: gelu of 16-bit elements; besides, at an odd address

# `row_reread` and `tile_reread`.
# The time of a read from the L2 cache, as a fraction of a read from memory; and if the same program has just read it.
FROM_L2, FROM_L2_AT_ONCE = 0.72, 0.49
PART = 5e-5  # to store and combine a number of partial moments

# Copy rates in TB/s, by the width in bytes of the chunk that is copied of each row. Wider chunks gain little: 256 bytes reach 4.00 TB/s.
RATES = {0: 0.0, 32: 2.5, 64: 3.0, 128: 3.71}

# `team`.
BARRIER = 2.0  # the wait until all members of a team have stored their moments
# To merge 128 parts, which are read together. A part is the moments that one member has of one set; or each column is a set.
MERGE, MERGE_COLUMNS = 0.7, 0.039
STALL = 8.0  # the wait for the loads of a team's next unit of work, if the team has several members. From two trials
REFILL = 3.0  # the same wait, if the team has one member; assumed, not measured
TEAM_FROM_L2 = 0.35  # the time of a read from the L2 cache, as a fraction of a read from memory; assumed, not measured
TEAM_START, TEAM_SCALE = 13.4, 0.53  # from modelled times to costs, of teams that read their rows twice
TEAM_REREAD_GELU = 0.7  # a factor of the rate of such a team: gelu
TEAM_REREAD_ODD = {2: 0.74, 4: 0.8}  # another one: an odd address, by the size of an element
TEAM_ODD = 0.8  # a factor of the rate: elements of 16 bits at an odd address
# If a team reads its rows twice, the time for its traffic counts this many times: the many small programs of `tile_reread` hide latencies
# better.
TEAM_REREAD = 1.3

# `whole_set`. Most are close to what the script finds for 374 launches (2026-11-18). Set by hand, to choose better launches and families:
# WHOLE_CENTERED, WHOLE_ONE_BY_ONE, WHOLE_ADDED, WHOLE_CROWDED, WHOLE_THREADS, WHOLE_FEW, WHOLE_ALONE, WHOLE_STALL and WHOLE_SCALE.
WHOLE_LAUNCH = 5.1  # for a launch, with the first load and the last store
WHOLE_BANDWIDTH = 4.1e6  # bytes per microsecond
WHOLE_FEW = 1.5  # instead of FEW_PROGRAMS: a program has many loads under way
WHOLE_ELEMENT, WHOLE_OWN, WHOLE_ACTIVATION = 0.021, 0.02, 0.02  # for each element of a thread; added: own parameters, an activation
WHOLE_CENTERED = 1.21  # a factor of the traffic: sums of x first, then of squares, and each element loads parameters of its own
WHOLE_MASKED = 1.09  # another one: threads have different numbers of vectors
WHOLE_ONE_BY_ONE = 2.5  # another one: elements of 16 bits are loaded one by one
WHOLE_ADDED = 1.4  # another one: a residual
WHOLE_GELU = 1.2  # another one: gelu of 16-bit elements
WHOLE_CROWDED = 1.25  # another one: each element loads parameters of its own, and the elements fill half of the registers
WHOLE_THREADS = 1.12  # another one, for means in 256 threads; twice for 512
WHOLE_EXCHANGE = 1.8  # teams: to exchange moments
WHOLE_MEMBER, WHOLE_MEMBER_APART = 0.03, 0.14  # added for each member; and if the moments of a set's members do not lie side by side
WHOLE_ALONE = 1.0  # teams: a multiprocessor has one program, and idles while that waits for its team
WHOLE_STALL = 3.5  # teams: the wait for the loads of the next set
WHOLE_REFILL = 0.72  # no teams: the same wait, if one program fits on a multiprocessor
WHOLE_SCALE = 1.11  # from modelled times to costs

# `ring`. Most are close to what `python -m benchmarks.fit results/launches-h200.jsonl` finds for 659 launches (2026-11-18). Set by hand, to
# choose better launches and families: DIRECT, RING_UNPAIRED, RING_TALL, RING_FLAT, RING_PARTIAL, RUN_AGAIN, RUN_FROM_L2, RUN_FROM_L2_ONCE,
# RUN_PARAMETERS, RUN_FIRST_DIRECT and the scales.
DIRECT = 0.3  # a team of one member exchanges nothing: this fraction of the times of an exchange remains

# `ring`, where several sets share a row.
RING_EXCHANGE = 7.7  # from the arrival of a unit's last block in shared memory until the unit's first block leaves it
RING_BLOCK = 0.8  # to load, reduce, apply and store one block of 16 KB on every multiprocessor
RING_CROWDED = 0.12  # by this fraction RING_BLOCK is longer if a unit fills the whole ring; by half of it, if it fills half of the ring
RING_UNEVEN = 1.11  # a factor: several tiles, and members have different numbers of blocks, so that each block takes a division
RING_UNPAIRED = 1.03  # a factor: `apply` takes one block at a time, not two
RING_TALL, RING_FLAT = 1.02, 1.04  # factors: blocks of more than 64 rows, and of fewer
RING_MERGE = 1.13  # to merge the rows of a tile into moments of its columns
RING_UNIT, RING_TILE, RING_SET = 0.23, 1.24, 0.186  # to publish and combine moments: for a unit, for each of its tiles and of its sets
RING_COLUMNS, RING_WIDE_COLUMNS = 0.129, 0.45  # instead of RING_SET, for each member, if each column is a set; of float32
RING_NARROW = 1.25  # a factor of RING_BLOCK: one team, and blocks less than 256 bytes wide. Several teams read neighbouring blocks
RING_AGAIN = 0.18  # of RING_BLOCK, for a block that is loaded twice
RING_PARTIAL = 1.5  # a factor: some blocks of a unit are loaded twice

# `ring`, where a set is one run (the walk is folded).
RUN_UNIT = 0.63  # for the memory: for each unit
RUN_BLOCK = 0.83  # for the memory: to load and store 16 KB on every multiprocessor
RUN_CROWDED = 0.52  # by this fraction RUN_BLOCK is longer if a unit fills the whole ring; by half of it, if it fills half of the ring
RUN_AGAIN = 0.84  # of RUN_BLOCK, for a block that is loaded twice, if teams have several units: the L2 cache hides a part of it
RUN_FROM_L2, RUN_FROM_L2_ONCE = 1.3, 1.4  # factors of RUN_BLOCK: elements have parameters of their own, from the L2 cache; for one unit
RUN_PARAMETERS = 0.8e-6  # to read a byte of parameters from memory, once
RUN_APPLY = 0.2  # for arithmetic: for each unit
RUN_ANY_BLOCK = 0.13  # for arithmetic: for each block, whatever its size
RUN_COMPUTE = 0.8  # for arithmetic: to reduce and apply 8192 elements
RUN_ACTIVATION, RUN_GELU = 1.27, {2: 2.0, 4: 3.5}  # factors of RUN_COMPUTE: an activation; gelu instead, by the size of an element
RUN_UNALIGNED = 1.5  # a factor of RUN_COMPUTE: runs begin between multiples of 16 bytes
RUN_ONE_BY_ONE = 1.76  # another one: and each element has parameters of its own, which are loaded one by one
RUN_COMBINE, RUN_COMBINE_MEMBER = 0.67, 0.001  # to combine the moments of a set, and for each member
RUN_EXCHANGE = 1.2  # how long the exchange delays the blocks of a unit
RUN_FIRST, RUN_FIRST_DIRECT = 12.0, 10.5  # what the first unit adds, before anything overlaps; in teams of one member

# `ring`, backward, by the kinds of launches (ring/launch_backward.py). Fitted by least squares to 337 launches of 56 problems (H200,
# 2026-11-20). The model chooses launches that are 1 % slower than the best measured ones, and its mean error is 6 %. `python -m
# benchmarks.fit --direction backward results/launches-backward-h200.jsonl` fits most of them again.
BACK_FIRST = {"columns": 12.7, "blocks": 17.1, "set": 13.0, "elements": 11.5}  # what the first unit adds, and the sums of cells
BACK_ALONE = 4.5  # without the exchange, in teams of one member
BACK_BYTES = {"columns": 1.48, "blocks": 1.1, "set": 1.6, "elements": 1.12}  # to load 16 KB of x and of dy and to store dx, everywhere
BACK_WIDE = 0.16  # added to it: columns, tiles of more than 128 bytes, in which sets have several columns
BACK_BLOCK = {"columns": 0.09, "blocks": 0.2, "set": 0.2, "elements": 0.09}  # for each block
BACK_CROWDED = {"columns": 0.36, "blocks": 0.85, "set": 0.85, "elements": 1.35}  # added to BACK_BYTES if a unit fills two rings; half: none
BACK_SILU = {"columns": 0.43, "blocks": 0.61, "set": 0.61, "elements": 0.71}  # for 8192 elements
BACK_GELU = {"columns": 3.9, "blocks": 2.8, "set": 2.8, "elements": 2.8}
BACK_UNIT = {"columns": 0.18, "blocks": 0.17, "set": 0.2, "elements": 0.48}  # for each unit
BACK_RUN = 0.1  # for each run of a unit
BACK_TILE, BACK_SET, BACK_MEMBER = 0.82, 0.03, 0.007  # for each tile of several, each set and each member
BACK_MANY_SETS = 1.0  # for each unit, if a tile has more than 8 sets
BACK_COLUMNS = 0.25  # if each column is a set: for each 1024 sums of the members
BACK_MANY_SUMS = 0.18  # added to BACK_BYTES: registers are full of sums for parameters
BACK_EXCHANGE = 1.7  # SET: the least for each unit, since `combine` takes one after the other. As in the forward, not measured
BACK_CELLS = 4.2  # to store and to add up a million cells
BACK_SCALE, BACK_SCALE_ELEMENTS = 1.22, 1.26  # from modelled times to costs; of elements

# `whole_set`, backward. Set by hand, to 26 launches of 16 problems (H200, 2026-11-19): the modelled times are within 11 % of all of them.
WHOLE_BACK_FIRST = 4.4  # for a launch, with the first load and the last store
WHOLE_BACK_BANDWIDTH = 4e6  # bytes per microsecond
WHOLE_BACK_SILU, WHOLE_BACK_GELU = 0.58, 2.7  # for 8192 elements of a multiprocessor
WHOLE_BACK_EXCHANGE = 3.6  # teams: to exchange sums, once
WHOLE_BACK_STALL = 3.2  # teams: the wait for the loads and for the sums of each further set
WHOLE_BACK_ALONE = 0.3  # added to it: a multiprocessor has one program, and idles while that waits for its team
WHOLE_BACK_MEMBER = 0.003  # teams: for each member and each set
WHOLE_BACK_UNALIGNED = 1.6  # a factor: x is at an odd address. Assumed, not measured
WHOLE_BACK_SCALE = 1.18  # from modelled times to costs
WHOLE_BACK_REFILL = 0.9  # no teams: the same wait, if one program fits on a multiprocessor

# From modelled times to costs.
RING_START = 6.76  # for each launch
RING_SCALE = 0.93  # sets of several runs or columns
RING_SCALE_AGAIN = 1.3  # instead, if a tile has several sets, and some of its blocks are loaded twice
