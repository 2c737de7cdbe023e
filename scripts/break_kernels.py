#!/usr/bin/env python3
"""Mutation tests: break kernels on purpose, one change at a time, and show that `tessera verify` and the benchmarks
catch it.

For each mutation, a copy of kernels/ is changed, the library compiles from it (TESSERA_KERNEL_SOURCES), and the checks
that should catch it run: verify's suites, `tessera bench --check`, a GPU test for what only many calls show, and
`python -m tessera.bench` if this Python has a PyTorch that sees the GPU. Races that an idle GPU hides are looked for with
late warps (delayed_sources.py), which unchanged kernels must survive. Every command also runs on an
unchanged copy and must pass there: a check that always fails catches nothing. The table, the output of every command
and break_kernels.json go to OUT.

Exit code: 0 if all were caught, 1 if one was not, 2 for bad usage or a mutation that does not match its source, 3 if
there is no GPU.
"""

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading

import delayed_sources

ROOT = pathlib.Path(__file__).resolve().parent.parent
TIMEOUT_S = 120

QUICK_FORWARD = ("quick", "fwd/fp16/b2_sq33")
QUICK_BACKWARD = ("quick", "bwd/fp16/b2_sq33")
FORWARD = ("sm_80", "attention_forward_bf16_d8x8")
BACKWARD = ("sm_80", "attention_backward_bf16_d8x8")
FORWARD_CACHE = ("sm_80", "attention_forward_bf16_d64x64_64x64w4_masked_cache")
FORWARD_PAGED = ("sm_80", "attention_forward_bf16_d64x64_64x64w4_masked_chunked_paged")
CACHE_APPEND = ("sm_80", "cache_append_bf16_v8")
SM90_CACHE = ("sm_90a", "attention_forward_sm90_bf16_d64x64_192x128_masked_cache")
SM90_CHUNKS = ("sm_90a", "attention_forward_sm90_bf16_d64x64_192x128_masked_chunked_cache")
MANY_QUERIES = ("quick", "dec/fp16/b3_sq40")
PACKED_QUERIES = ("quick", "queries17")
SM90 = ("sm_90a", "attention_forward_sm90_bf16_d64x64_64x64")  # with and without an intra-CTA split
SM90_BACKWARD = ("sm_90a", "attention_backward_sm90_bf16_d64x64")
WIDE_BACKWARD = ("sm_90a", "attention_backward_wide_sm90_bf16_d192x192")
WIDE_CASES = ("full", "bwd/bf16/b1_sq513_sk640")
# For sm_80, so that no cluster does without partial results. 100 keys are one tile, thousands are shared among CTAs.
DECODE = ("sm_80", "attention_decode_bf16_d64x64")
DECODE_APPEND = ("sm_80", "attention_decode_bf16_d128x128")  # with and without pages, new keys and rotary embedding
DECODE_COMBINE = ("sm_80", "decode_combine_bf16_d64")
QUICK_DECODE = ("quick", "dec/fp16/b3_sq1_sk100_h4:2_d64")
QUICK_APPEND = ("quick", "append")
DECODE_TMA = ("sm_90a", "attention_decode_bf16_d80x80")
BOXES = ("full", "dec/bf16/b3_sq1_sk300_h4:1_d80")  # rows that are no whole lines: TMA
MANY_TILES = ("full", "dec/bf16/b2_sq1_sk33800")
SHARED_KEYS = ("full", "dec/bf16/b2_sq1_sk4096_h8:1_d128")
GEMM = ("sm_80", "gemm_dense_bf16_bf16_nn_64x64")
GEMM_SM90 = ("sm_90a", "gemm_dense_sm90_bf16_bf16_nn_64x256")
QUICK_GEMM = ("quick", "gemm/bf16")
NORM = ("sm_80", "norm_forward_bf16")
NORM_BACKWARD = ("sm_80", "norm_backward_bf16")
GMM = ("sm_80", "loss_gmm_nll_bf16")
GROUPED_ROWS = ("sm_90a", "64x240s5_ping_pong_cluster_ragged_rows")
GROUPED_SUMS = ("sm_90a", "64x256s4_ping_pong_cluster_ragged_sums")


@dataclasses.dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # below kernels/
    edits: tuple  # of (text that occurs exactly once, its replacement)
    compile: tuple  # (architecture, part of the instance names): what --compile compiles
    kernel: str = ""  # its name in verify's JSON; only cases that it served count
    arch_code: str = "sm_80"  # the --arch-code for which this kernel is selected
    verify: tuple = ()  # (suite, filter)
    repeat: int = 1
    bench: tuple = ()  # (suite, filter) of tessera bench --check
    gtest: str = ""  # filter of cuda_test
    race: bool = False  # the result depends on timing: repeated, on shapes with many tiles
    delayed: bool = False  # warps are late at random (delayed_sources.py): without, this race is not seen
    gate: bool = False  # ptxas repairs it and reports that: the compile gate must fail
    excuse: str = ""  # why it may go uncaught; it is then listed, but does not count


MUTATIONS = (
    Mutation("forward_skips_a_key_tile", "attention/forward.cuh",
             (("tile >= first_tile; --tile", "tile > first_tile; --tile"),),
             FORWARD, "attention_forward", verify=QUICK_FORWARD, bench=("quick", "fwd/fp16/b1_sq65")),
    Mutation("forward_does_not_wait_for_keys", "attention/forward.cuh",
             (("      load_k.end(tile_k);\n", ""),),
             FORWARD, "attention_forward", verify=QUICK_FORWARD, repeat=5, bench=("quick", "fwd/fp16/b1_sq65"),
             race=True),
    Mutation("forward_drops_a_barrier", "attention/forward.cuh",
             (("      load_k.end(tile_k);\n      __syncthreads();\n", "      load_k.end(tile_k);\n"),),
             FORWARD, "attention_forward", verify=("full", "fwd/fp16/b2_sq113"), repeat=20, race=True),
    Mutation("forward_masks_one_key_too_many", "attention/forward.cuh",
             (("visible_keys<config.masked, config.chunked>(p.band, query_of(m, half)",
               "visible_keys<config.masked, config.chunked>({p.band.left, p.band.right - 1, p.band.bottom_right, "
               "p.band.chunk}, query_of(m, half)"),),
             FORWARD, "attention_forward", verify=QUICK_FORWARD),
    Mutation("forward_does_not_mask_chunks", "attention/forward.cuh",
             (("visible_keys<config.masked, config.chunked>(p.band, query_of(m, half)",
               "visible_keys<config.masked, false>(p.band, query_of(m, half)"),),
             FORWARD_PAGED, "attention_forward", verify=("quick", "chunk")),
    Mutation("sm90_forward_does_not_mask_chunks", "attention/forward_sm90_consumer.cuh",
             (("visible_keys<config.masked, config.chunked>(p.band, query_of(half)",
               "visible_keys<config.masked, false>(p.band, query_of(half)"),),
             SM90_CHUNKS, "attention_forward_sm90", "native", verify=("quick", "chunk")),
    Mutation("forward_reads_left_padding", "attention/forward.cuh",
             ((" + cached.leftpad * strides.seq", ""),),
             FORWARD_CACHE, "attention_forward", verify=PACKED_QUERIES),
    Mutation("forward_reads_the_page_before", "tile/kv_cache.cuh",
             (("pages[page]", "pages[page > 0 ? page - 1 : 0]"),),
             FORWARD_PAGED, "attention_forward", verify=PACKED_QUERIES),
    Mutation("forward_reads_the_row_of_another_sequence", "attention/forward.cuh",
             (("nullptr, cached.row, head", "nullptr, 0, head"),),
             FORWARD_CACHE, "attention_forward", verify=PACKED_QUERIES),
    Mutation("cache_append_does_not_advance_queries", "attention/cache_append.cuh",
             (("position + (p.rotary_advances ? i : 0)", "position"),),
             CACHE_APPEND, "attention_forward_sm90", "native", verify=MANY_QUERIES),
    Mutation("cache_append_leaves_out_the_last_value", "attention/cache_append.cuh",
             (("for_chunks(p.seq_new, p.heads_kv, p.dim_v,", "for_chunks(p.seq_new - 1, p.heads_kv, p.dim_v,"),),
             CACHE_APPEND, "attention_forward_sm90", "native", verify=MANY_QUERIES),
    Mutation("cache_append_takes_what_does_not_fit", "attention/cache_append.cuh",
             (("p.lengths[batch] = fits ? length + p.seq_new : -1;", "p.lengths[batch] = fits ? length + p.seq_new : 1;"),),
             CACHE_APPEND, "attention_forward_sm90", "native", verify=("hostile", "dec/fp16/b3_sq33")),
    Mutation("sm90_forward_reads_left_padding", "attention/forward_sm90_producer.cuh",
             (("cached.row * p.k_pitch + cached.leftpad", "cached.row * p.k_pitch"),),
             SM90_CACHE, "attention_forward_sm90", "native", verify=PACKED_QUERIES),
    Mutation("forward_does_not_rescale", "attention/forward.cuh",
             (("output[m][n][half * 2] *= factor;", ""), ("output[m][n][half * 2 + 1] *= factor;", "")),
             FORWARD, "attention_forward", verify=("hostile", "fwd/fp16/b1_sq130")),
    Mutation("backward_skips_a_query_tile", "attention/backward.cuh",
             (("const int steps = tiles.count * p.group;", "const int steps = tiles.count * p.group - 1;"),),
             BACKWARD, "attention_backward", verify=QUICK_BACKWARD, bench=("quick", "bwd/fp16/b1_sq65")),
    Mutation("backward_drops_a_named_barrier", "attention/backward.cuh",
             (("    named_barrier_sync(1 + strip, kThreads);\n", ""),),
             BACKWARD, "attention_backward", verify=QUICK_BACKWARD, repeat=5, race=True),
    # On code for sm_75, which has one stage: with two, warps that run ahead would arrive at a named barrier twice, and
    # the kernel could hang.
    Mutation("backward_drops_a_barrier", "attention/backward.cuh",
             (("      __syncthreads();  // dS is written, Q and dO may be overwritten\n", ""),),
             ("sm_75", "attention_backward_fp16_d8x8"), "attention_backward", "sm_75",
             verify=("full", "bwd/fp16/b2_sq113"), repeat=10, race=True, delayed=True),
    Mutation("backward_dq_skips_a_key_tile", "attention/backward_dq.cuh",
             (("tile < end_tile; ++tile", "tile + 1 < end_tile; ++tile"),),
             ("sm_80", "backward_dq_bf16_d8x8"), "attention_backward", verify=("full", "bwd/fp16/b1_sq193")),
    Mutation("backward_preprocess_reads_the_row_before", "attention/backward_preprocess.cuh",
             (("load_streaming_16(d_o + row * p.d_o_strides.seq",
               "load_streaming_16(d_o + (row > 0 ? row - 1 : row) * p.d_o_strides.seq"),),
             ("sm_80", "backward_preprocess_bf16_v8"), "attention_backward", verify=QUICK_BACKWARD),
    Mutation("backward_preprocess_zeroes_too_little", "attention/backward_preprocess.cuh",
             (("i < zeroed_end; i +=", "i + 1 < zeroed_end; i +="),),
             ("sm_80", "backward_preprocess_bf16_v8"), "attention_backward", verify=QUICK_BACKWARD),
    Mutation("backward_convert_leaves_out_the_last_row", "attention/backward_convert.cuh",
             (("if (row >= length ||", "if (row + 1 >= length ||"),),
             ("sm_80", "backward_convert_bf16_v8"), "attention_backward", verify=QUICK_BACKWARD),
    Mutation("sm90_forward_skips_a_key_tile", "attention/forward_sm90_consumer.cuh",
             (("tiles.first = tiles.keys.first_tile(config.block_k);",
               "tiles.first = tiles.keys.first_tile(config.block_k) + 1;"),
              ("for (int of = 1; of < config.consumers; ++of)", "for (int of = 2; of < config.consumers; ++of)")),
             SM90, "attention_forward_sm90", "native", verify=QUICK_FORWARD, bench=("quick", "fwd/fp16/b1_sq65")),
    Mutation("sm90_forward_does_not_wait_for_keys", "attention/forward_sm90_consumer.cuh",
             (("    wait(kAt.k_full, k_pipe.index, k_pipe.parity);\n    const unsigned q_tile",
               "    const unsigned q_tile"),),
             SM90, "attention_forward_sm90", "native", verify=QUICK_FORWARD, repeat=5, race=True),
    Mutation("sm90_forward_releases_keys_early", "attention/forward_sm90_consumer.cuh",
             (("    wait(kAt.k_full, k_pipe.index, k_pipe.parity);\n    const unsigned q_tile",
               "    wait(kAt.k_full, k_pipe.index, k_pipe.parity);\n    release(kAt.k_empty, k_pipe.index);\n"
               "    const unsigned q_tile"),
              ("      release(kAt.k_empty, k_pipe.index);\n      k_pipe.advance();\n      wgmma_fence_operand(scores);",
               "      k_pipe.advance();\n      wgmma_fence_operand(scores);")),
             SM90, "attention_forward_sm90", "native", verify=("full", "fwd/fp16/b2_sq113"), repeat=5, race=True,
             delayed=True),
    Mutation("sm90_forward_does_not_rescale", "attention/forward_sm90_consumer.cuh",
             (("output[i] *= rescale[i / 2 % 2];", ";"),),
             SM90, "attention_forward_sm90", "native", verify=("hostile", "fwd/fp16/b1_sq130")),
    Mutation("sm90_forward_drops_a_fence", "ptx/wgmma.cuh",
             (('asm volatile("wgmma.fence.sync.aligned;" ::: "memory");', ""),),
             SM90, "attention_forward_sm90", "native", verify=QUICK_FORWARD, repeat=5,
             excuse="ptxas 13.0 inserts WARPGROUP.ARRIVE before every wgmma group anyway"),
    Mutation("sm90_forward_does_not_wait_for_scores", "attention/forward_sm90_consumer.cuh",
             (("      wgmma_wait_group<1>();\n", ""),),
             SM90, "attention_forward_sm90", gate=True),
    Mutation("sm90_backward_skips_a_query_tile", "attention/backward_sm90_work.cuh",
             (("steps = tiles.count * heads(p);", "steps = tiles.count * heads(p) - 1;"),),
             SM90_BACKWARD, "attention_backward_sm90", "native", verify=QUICK_BACKWARD,
             bench=("quick", "bwd/fp16/b1_sq65")),
    Mutation("sm90_backward_parts_of_a_group_start_at_its_first_head", "attention/backward_sm90_work.cuh",
             (("first + part * static_cast<int>(p.part_heads) : first;", "first : first;"),),
             SM90_BACKWARD, "attention_backward_sm90", "native", verify=("full", "bwd/bf16/b1_sq500_sk700")),
    Mutation("sm90_backward_does_not_wait_for_queries", "attention/backward_sm90_consumer.cuh",
             (("{ wait(kAt.q_full, of.index, of.parity); }", "{}"),),
             SM90_BACKWARD, "attention_backward_sm90", "native", verify=QUICK_BACKWARD, repeat=5, race=True,
             delayed=True),
    # The wait for ds_empty stays: without it, the phases of ds_full could get ahead of the dQ warpgroup, and the kernel
    # could hang.
    Mutation("sm90_backward_hands_ds_over_too_early", "attention/backward_sm90_consumer.cuh",
             (("    wait(kAt.ds_empty, ds_pipe.index, ds_pipe.parity ^ 1);\n",
               "    wait(kAt.ds_empty, ds_pipe.index, ds_pipe.parity ^ 1);\n"
               "    release(kAt.ds_full, ds_pipe.index);\n"),
              ("    __syncwarp();\n    release(kAt.ds_full, ds_pipe.index);\n", "    __syncwarp();\n")),
             SM90_BACKWARD, "attention_backward_sm90", "native", verify=QUICK_BACKWARD, repeat=5, race=True),
    Mutation("sm90_backward_does_not_wait_for_dp", "attention/backward_sm90_consumer.cuh",
             (("      wgmma_wait_group<0>();  // dP, and dK of the previous step\n", ""),),
             SM90_BACKWARD, "attention_backward_sm90", gate=True),
    Mutation("wide_backward_skips_a_query_tile", "attention/backward_wide_sm90_work.cuh",
             (("steps = tiles.count * heads(p);", "steps = tiles.count * heads(p) - 1;"),),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native", verify=WIDE_CASES),
    Mutation("wide_backward_adds_out_of_turn", "attention/backward_wide_sm90_dq.cuh",
             (("while (load_acquire(turns) != turn) {", "while (load_acquire(turns) == turn + 1000) {"),),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native",
             verify=("full", "bwd/bf16/b1_sq513_sk640_h2:1_d256/det"), repeat=50, race=True),
    Mutation("wide_backward_does_not_wait_for_queries", "attention/backward_wide_sm90_consumer.cuh",
             (("    this->template wait_full<config.q_stages>(kAt.q_full, step);\n    wgmma_fence();\n",
               "    wgmma_fence();\n"),),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native", verify=WIDE_CASES, repeat=5, race=True),
    # The wait for p_empty stays: without it, the phases of p_full could get ahead of the dS warpgroup, and the kernel
    # could hang.
    Mutation("wide_backward_hands_p_over_too_early", "attention/backward_wide_sm90_consumer.cuh",
             (("    this->template wait_empty<config.p_stages>(kAt.p_empty, at);\n",
               "    this->template wait_empty<config.p_stages>(kAt.p_empty, at);\n"
               "    this->template arrive<config.p_stages>(kAt.p_full, at);\n"),
              ("    __syncwarp();\n    this->template arrive<config.p_stages>(kAt.p_full, at);\n", "    __syncwarp();\n")),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native", verify=WIDE_CASES, repeat=20, race=True),
    Mutation("wide_backward_hands_ds_over_too_early", "attention/backward_wide_sm90_consumer.cuh",
             (("    this->template wait_empty<config.ds_stages>(kAt.ds_empty, at);\n",
               "    this->template wait_empty<config.ds_stages>(kAt.ds_empty, at);\n"
               "    this->template arrive<config.ds_stages>(kAt.ds_full, at);\n"),
              ("    __syncwarp();\n    this->template arrive<config.ds_stages>(kAt.ds_full, at);\n",
               "    __syncwarp();\n")),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native", verify=WIDE_CASES, repeat=5, race=True),
    Mutation("wide_backward_sees_keys_behind_the_sequence", "attention/backward_wide_sm90_consumer.cuh",
             (("if (key >= keys) queries.end = queries.begin;", ""),),
             WIDE_BACKWARD, "attention_backward_wide_sm90", "native", verify=("full", "bwd/bf16/b1_sq200_sk150")),
    Mutation("decode_skips_the_last_tile", "attention/decode_schedule.cuh",
             (("(sequence.length - 1 >> s.tile_shift) + 1 - sequence.first_tile",
               "(sequence.length >> s.tile_shift) - sequence.first_tile"),),
             DECODE, "attention_decode", verify=("full", "dec/bf16/b3_sq1_sk300_h4:1_d64"),
             bench=("full", "dec/bf16/b3_sq1_sk300_h4:1_d64")),
    Mutation("decode_masks_one_key_too_many", "attention/decode.cuh",
             (("keys[half] = {max(seen.begin, sequence.begin), min(seen.end, sequence.length)};",
               "keys[half] = {max(seen.begin, sequence.begin), min(seen.end, sequence.length - 1)};"),),
             DECODE, "attention_decode", verify=QUICK_DECODE),
    # What lies before leftpad is NaN: no score shows it, but 0 times such a value does.
    Mutation("decode_loads_keys_before_leftpad", "attention/decode_cache.cuh",
             (("(key >= begin && key < end)", "key < end"),),
             DECODE, "attention_decode", verify=("quick", "leftpad")),
    Mutation("decode_merges_key_warps_without_factors", "attention/decode.cuh",
             (("merged[0] += part[0] * factor[other];", "merged[0] += part[0];"),),
             DECODE, "attention_decode", verify=("hostile", "dec/fp16/b2_sq1_sk700_h4:1_d128")),
    Mutation("decode_reads_the_first_row_block_s_queries", "attention/decode.cuh",
             (("first_row = row_of(load.column, 0);", "first_row = 0;"),),
             DECODE, "attention_decode", verify=("full", "dec/bf16/b2_sq7_sk100_h32:2_d64")),
    Mutation("decode_reads_the_pages_of_another_sequence", "attention/decode_cache.cuh",
             (("pages = s.page_table + batch * s.page_table_stride;",
               "pages = s.page_table + (batch + 1 < s.batch ? batch + 1 : 0) * s.page_table_stride;"),),
             DECODE_APPEND, "attention_decode", verify=("quick", "dec/fp16/b3_sq1_sk112_h4:2_d64/page16")),
    Mutation("decode_does_not_extend_the_cache", "attention/decode.cuh",
             (("const bool writes = row_of(at.column, 0) == 0;", "const bool writes = false;"),),
             DECODE_APPEND, "attention_decode", verify=QUICK_APPEND, gtest="*DecodeLoop*of_16"),
    Mutation("decode_rotates_the_other_way", "tile/rotary.cuh",
             (("first ? -__fmul_rn(y, sine) : __fmul_rn(y, sine)", "first ? __fmul_rn(y, sine) : -__fmul_rn(y, sine)"),),
             DECODE_APPEND, "attention_decode", verify=("quick", "rotary")),
    # A position of 0 stays, so that nothing is read outside the table.
    Mutation("decode_rotates_keys_a_position_short", "attention/decode_cache.cuh",
             (("chunk, rotary_position + which)", "chunk, max(rotary_position + which - 1, 0))"),),
             DECODE_APPEND, "attention_decode", verify=("quick", "rotary")),
    Mutation("decode_rotates_queries_a_position_short", "attention/decode.cuh",
             (("const int position = rotary_position(at), chunk",
               "const int position = max(rotary_position(at) - 1, 0), chunk"),),
             DECODE_APPEND, "attention_decode", verify=("quick", "rotary")),
    Mutation("decode_does_not_wait_for_keys", "attention/decode.cuh",
             (("        cp_async_wait_group<config.stages - 2>();\n", ""),),
             DECODE, "attention_decode", verify=QUICK_DECODE, repeat=5, race=True),
    # The warps that did not load a key multiply what was in its place: on code for sm_75, which has one stage, the tile
    # before, and of a new key a row of zeros, because its one warp still waits for global memory.
    Mutation("decode_drops_a_barrier_before_the_products", "attention/decode.cuh",
             (("        load_tile(load, 0);\n        __syncthreads();\n", "        load_tile(load, 0);\n"),),
             ("sm_75", "attention_decode_fp16_d64x64"), "attention_decode", "sm_75",
             verify=("full", "dec/fp16/b3_sq1_sk1025_h8_d64"), repeat=10, race=True),
    Mutation("decode_drops_a_barrier_after_new_keys", "attention/decode.cuh",
             (("first_key, 0, writes);\n    sync_warps();\n", "first_key, 0, writes);\n"),),
             DECODE_APPEND, "attention_decode", verify=QUICK_APPEND, repeat=5, race=True),
    Mutation("decode_combine_ignores_the_first_part", "attention/decode_combine.cuh",
             (("const bool wanted = part < parts.count;", "const bool wanted = part > 0 && part < parts.count;"),),
             DECODE_COMBINE, "attention_decode", verify=SHARED_KEYS),
    Mutation("decode_combine_reads_another_slot", "attention/decode_combine.cuh",
             (("part == 0 && first_is_apart ? first + 1 : first + part * step", "first + part * step"),),
             DECODE_COMBINE, "attention_decode", verify=SHARED_KEYS),
    Mutation("decode_cluster_ignores_its_last_cta", "attention/decode.cuh",
             (("if (other >= parts) continue;", "if (other + 1 >= parts) continue;"),),
             ("sm_90a", "attention_decode_bf16_d64x64"), "attention_decode", "native",
             verify=("full", "dec/bf16/b3_sq1_sk300_h4:1_d128")),
    # TMA loads whole boxes: what lies beyond the length or before leftpad is NaN.
    Mutation("decode_keeps_values_beyond_the_length", "attention/decode.cuh",
             (("const bool cleared = clear_values(at, pipe.index);", "const bool cleared = false;"),),
             DECODE_TMA, "attention_decode", "native", verify=BOXES),
    Mutation("decode_loads_another_page", "attention/decode.cuh",
             (("const int page = page_of(s, key);", "const int page = page_of(s, first_key);"),),
             DECODE_TMA, "attention_decode", "native", verify=("quick", "dec/fp16/b3_sq1_sk112_h4:2_d64/page16")),
    Mutation("decode_does_not_wait_for_boxes", "attention/decode.cuh",
             (("      mbarrier_wait_parity(full_barrier(pipe.index), pipe.parity);\n", ""),),
             DECODE_TMA, "attention_decode", "native", verify=BOXES, repeat=5, race=True),
    Mutation("decode_releases_a_stage_early", "attention/decode.cuh",
             (("mbarrier_init(empty_barrier(stage), kWarps);", "mbarrier_init(empty_barrier(stage), 1);"),),
             DECODE_TMA, "attention_decode", "native", verify=MANY_TILES, repeat=5, race=True),
    Mutation("decode_forgets_the_cost_of_ends", "attention/decode_schedule.cuh",
             (("const unsigned cost = sequence.cost(s);", "const unsigned cost = sequence.units(s);"),),
             DECODE, "attention_decode", verify=("full", "dec/bf16/b33_sq1_sk300")),
    Mutation("gemm_skips_the_last_step", "gemm/dense.cuh",
             (("for (int k = first_k; k < end_k; k += config.block_k) {",
               "for (int k = first_k; k + config.block_k < end_k; k += config.block_k) {"),),
             GEMM, "gemm_dense", verify=QUICK_GEMM),
    Mutation("gemm_drops_a_barrier", "gemm/dense.cuh",
             (("#endif\n      __syncthreads();\n      const int next", "#endif\n      const int next"),),
             GEMM, "gemm_dense", verify=("full", "gemm/bf16/m200_n264"), repeat=10, race=True),
    Mutation("gemm_reads_beyond_the_last_column", "gemm/dense.cuh",
             (("max(0, min(columns - column, 8))", "max(0, min(columns - column + 1, 8))"),),
             GEMM, "gemm_dense", verify=("full", "gemm/bf16/m141_n171")),
    Mutation("gemm_forgets_the_bias", "gemm/epilogue.cuh",
             (("if constexpr (config.bias) y[0] += bias[0], y[1] += bias[1];", ""),),
             GEMM, "gemm_dense", verify=QUICK_GEMM),
    Mutation("gemm_reduce_skips_a_split", "gemm/split_reduce.cuh",
             (("split < p.splits; ++split", "split + 1 < p.splits; ++split"),),
             ("sm_80", "gemm_split_reduce"), "gemm_dense", verify=("full", "gemm/bf16/m72_n56_k5000")),
    Mutation("gemm_pads_with_the_wrong_row", "gemm/pad_rows.cuh",
             (("    const Bits16* from = data + row * p.from.row_stride + column;\n    shift[i]",
               "    const Bits16* from = data + (row ^ 1) * p.from.row_stride + column;\n    shift[i]"),),
             ("sm_90a", "gemm_pad_rows"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000_n512_k1365")),
    Mutation("sm90_gemm_releases_a_stage_early", "gemm/dense_sm90_consumer.cuh",
             (("      wgmma_fence();\n      multiply(pipe.index, step == 0);\n",
               "      release(pipe.index);\n      wgmma_fence();\n      multiply(pipe.index, step == 0);\n"),
              ("        release(previous);\n      }\n", "      }\n"), ("\n    release(previous);\n  }\n", "\n  }\n")),
             GEMM_SM90, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000"), repeat=5, race=True, delayed=True),
    Mutation("sm90_gemm_does_not_wait_for_a_stage", "gemm/dense_sm90_consumer.cuh",
             (("      mbarrier_wait_parity(shared + kAt.full + pipe.index * kMbarrierBytes, pipe.parity);\n", ""),),
             GEMM_SM90, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m200_n264"), repeat=5, race=True),
    Mutation("sm90_gemm_mixes_row_groups", "gemm/dense_sm90_consumer.cuh",
             (("row % kGroupRows * 8 + row / kGroupRows", "row % kGroupRows * 8 + (row / kGroupRows ^ 1)"),),
             ("sm_90a", "shifted_a"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000_n200_k93")),
    Mutation("sm90_gemm_shifts_by_one_element_too_few", "gemm/dense_sm90_producer.cuh",
             (("p.shift[first / group_rows]", "max(0, p.shift[first / group_rows] - 1)"),),
             ("sm_90a", "shifted_a"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000_n200_k93")),
    Mutation("sm90_gemm_does_not_wait_for_the_next_frame", "gemm/dense_sm90_producer.cuh",
             (("        if constexpr (!config.a_transposed) mbarrier_wait_parity(frame_full(frame.index), frame.parity);\n",
               ""),),
             ("sm_90a", "shifted_a"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000_n64_k1365"),
             repeat=20, race=True),
    Mutation("sm90_gemm_stores_an_unaligned_row_shifted", "gemm/dense_sm90_consumer.cuh",
             (("eight_of_sixteen(before, own, 8 - shift[i])", "eight_of_sixteen(before, own, shift[i])"),),
             ("sm_90a", "_rows"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000_n1365")),
    Mutation("sm90_gemm_stores_a_box_too_early", "gemm/dense_sm90_consumer.cuh",
             (("        fence_proxy_async();\n        named_barrier_sync(barrier, 128);\n", "        fence_proxy_async();\n"),),
             GEMM_SM90, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m5000"), repeat=20, race=True),
    Mutation("sm90_gemm_skips_a_step", "gemm/dense_sm90_work.cuh",
             (("min(work.first_step + p.k_steps_per_split, p.k_steps)",
               "min(work.first_step + p.k_steps_per_split, p.k_steps - 1)"),),
             ("sm_90a", "shifted_a_split"), "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m72_n56_k5000")),
    Mutation("norm_forgets_the_weight", "norm/forward.cuh",
             (("rstd * w.value[e] + b.value[e]", "rstd + b.value[e]"),),
             NORM, "norm_forward", verify=("quick", "rmsnorm/bf16")),
    Mutation("norm_does_not_subtract_the_mean", "norm/forward.cuh",
             (("chunk.value[e] = (chunk.value[e] - mean)", "chunk.value[e] = chunk.value[e]"),),
             NORM, "norm_forward", verify=("quick", "layernorm/bf16")),
    Mutation("norm_drops_a_barrier", "norm/row.cuh",
             (("      __syncthreads();\n      x = 0;\n", "      x = 0;\n"),),
             NORM, "norm_forward", verify=("full", "layernorm/bf16/r1300"), repeat=10, race=True),
    Mutation("norm_stores_beyond_the_last_column", "norm/row.cuh",
             (("if (at >= columns) continue;", "if (at > columns) continue;"),),
             ("sm_80", "_unaligned"), "norm_forward", verify=("full", "rmsnorm/bf16/r9_n333/residual+unaligned")),
    Mutation("norm_does_not_read_the_last_column", "norm/row.cuh",
             (("static_cast<const Bits16*>(row) + at, at < columns", "static_cast<const Bits16*>(row) + at, at + 1 < columns"),),
             ("sm_80", "_unaligned"), "norm_forward", verify=("quick", "layernorm/bf16/r19_n1365")),
    Mutation("norm_backward_forgets_a_term", "norm/backward.cuh",
             (("- n * product_sum - sum)", "- sum)"),),
             NORM_BACKWARD, "norm_backward", verify=("quick", "rmsnorm_bwd/bf16")),
    Mutation("norm_backward_drops_a_row_of_the_cta", "norm/backward.cuh",
             (("(turn > 0 ? *at : 0.0f) + dweight[c][e]", "(turn > 1 ? *at : 0.0f) + dweight[c][e]"),),
             NORM_BACKWARD, "norm_backward", verify=("quick", "rmsnorm_bwd/bf16/r19_n136")),
    Mutation("norm_gradients_skip_the_last_part", "norm/parameter_gradients.cuh",
             (("part < p.parts; part +=", "part + 1 < p.parts; part +="),),
             ("sm_80", "norm_parameter_gradients_bf16"), "norm_backward", verify=("quick", "rmsnorm_bwd/bf16/r19_n136")),
    Mutation("rotary_turns_the_wrong_way", "norm/rotary.cuh",
             (("low = was * cos[i] - high * sin[i];", "low = was * cos[i] + high * sin[i];"),),
             ("sm_80", "norm_rotary_bf16_bf16_half"), "norm_rotary", verify=("quick", "rotary/bf16/b2_s5_h3_d64")),
    Mutation("rotary_ignores_positions", "norm/rotary.cuh",
             (("p.positions != nullptr ? p.positions[b * p.positions_stride + s] : static_cast<Index>(s)",
               "static_cast<Index>(s)"),),
             ("sm_80", "norm_rotary_bf16"), "norm_rotary", verify=("quick", "positions")),
    Mutation("gmm_nll_forgets_a_square", "loss/gmm_nll.cuh",
             (("r * (1.0f - z[i] * z[i])", "r * (1.0f - z[i])"),),
             GMM, "loss_gmm_nll", verify=("quick", "gmm_nll/bf16")),
    Mutation("gmm_nll_does_not_limit_z", "loss/gmm_nll.cuh",
             (("limited(limited(target - mu[i], kLargest) * precision[i], kMostZ)", "(target - mu[i]) * precision[i]"),),
             GMM, "loss_gmm_nll", verify=("hostile", "gmm_nll/bf16/r200_k10/gradient+narrow")),
    Mutation("gmm_nll_skips_the_last_partial", "loss/sum_partials.cuh",
             (("i < p.count; i +=", "i + 1 < p.count; i +="),),
             ("sm_80", "loss_sum_partials"), "loss_gmm_nll", verify=("quick", "gmm_nll/bf16/r130")),
    Mutation("gemm_group_begins_a_row_late", "gemm/dense.cuh",
             (("first_row = rows.begin + static_cast<int>(at.row)", "first_row = rows.begin + 1 + static_cast<int>(at.row)"),),
             ("sm_80", "gemm_dense_bf16_bf16_nn_64x64x32_ragged_rows"), "gemm_dense",
             verify=("quick", "gemm/bf16/m300_n72_k40")),
    Mutation("gemm_group_ends_a_tile_late", "gemm/dense.cuh",
             (("    end_row = rows.end;", "    end_row = p.m;"),),
             ("sm_80", "gemm_dense_bf16_bf16_nn_64x64x32_ragged_rows"), "gemm_dense",
             verify=("quick", "gemm/bf16/m300_n72_k40")),
    Mutation("gemm_forgets_the_groups_before_a_warp", "gemm/dense.cuh",
             (("      tile -= __shfl_sync(kAll, end, 31);\n", ""),),
             ("sm_80", "gemm_dense_bf16_bf16_nn_64x64x32_ragged_rows"), "gemm_dense",
             verify=("full", "gemm/bf16/m700_n40_k24")),
    Mutation("sm90_gemm_stores_rows_of_the_next_group", "gemm/dense_sm90_consumer.cuh",
             (("config.grouping != kRaggedRows || rows_left >= 64", "true"),),
             GROUPED_ROWS, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m640_n200_k136/ragged_rows")),
    Mutation("sm90_gemm_adds_terms_of_the_next_group", "gemm/dense_sm90_consumer.cuh",
             (("if (terms < gemm_sm90::kBlockK) clear_terms(pipe.index, terms);", ""),),
             GROUPED_SUMS, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m200_n136_k640/ragged_sums")),
    Mutation("sm90_gemm_does_not_wait_for_cleared_terms", "gemm/dense_sm90_consumer.cuh",
             (("    named_barrier_sync(config.ping_pong ? kStaged + consumer : kCleared, kThreads);\n", ""),),
             GROUPED_SUMS, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m520_n776_k9000"),
             repeat=20, race=True),
    Mutation("sm90_gemm_counts_a_group_twice", "gemm/dense_sm90_work.cuh",
             (("        first += tiles;\n", "        first += tiles - (tiles > 0 && group == 0);\n"),),
             GROUPED_ROWS, "gemm_dense_sm90", "native", verify=("full", "gemm/bf16/m640_n200_k136/ragged_rows")),
    Mutation("sm90_gemm_multiplies_by_the_first_layer", "gemm/dense_sm90_producer.cuh",
             (("config.grouping == kBatched || config.grouping == kRaggedRows ? work.group : 0", "0"),),
             GROUPED_ROWS, "gemm_dense_sm90", "native", verify=("quick", "gemm/bf16/m300_n72_k40")),
    Mutation("mlp_gate_forgets_the_derivative", "mlp/gated.cuh",
             (("dhidden.value[i] * before.value[i] * activation_derivative<config.activation>(gate.value[i])",
               "dhidden.value[i] * before.value[i]"),),
             ("sm_80", "mlp_gated_bf16"), "mlp_chained", verify=("quick", "mlp/bwd/bf16")),
    Mutation("mlp_gate_writes_behind_a_row", "mlp/gated.cuh",
             (("if (column + i < p.columns) at[i]", "if (column + i <= p.columns) at[i]"),),
             ("sm_80", "mlp_gated_bf16"), "mlp_chained",
             verify=("full", "mlp/bwd/bf16/m70_k40_h45_n33/silu+gated+bias")),
    Mutation("mlp_gate_skips_the_last_chunk", "mlp/gated.cuh",
             (("if (row >= p.rows) return;", "if (row >= p.rows || (index + 1) % p.row_chunks == 0) return;"),),
             ("sm_80", "mlp_gated_bf16"), "mlp_chained", verify=("quick", "mlp/bwd/bf16")),
)
# For the comparison with peers, which runs whichever kernel is selected: each of them skips a tile.
PEERS = ("forward_skips_a_key_tile", "sm90_forward_skips_a_key_tile", "backward_skips_a_query_tile",
         "sm90_backward_skips_a_query_tile", "wide_backward_skips_a_query_tile", "decode_skips_the_last_tile")


class Misfit(Exception):
    """The text of a mutation does not occur exactly once in its source."""


def edited(mutation, text):
    for old, new in mutation.edits:
        if text.count(old) != 1:
            raise Misfit(f"{mutation.name}: {mutation.file} has this {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    return text


def apply(mutation, folder):
    file = folder / mutation.file
    file.write_text(edited(mutation, file.read_text()))


class Checks:
    def __init__(self, options, scratch):
        self.tessera, self.python = pathlib.Path(options.tessera), options.python
        self.out, self.scratch, self.kernels = options.out, scratch, pathlib.Path(options.kernels)
        self.controls, self.lock = {}, threading.Lock()

    def copy(self, mutations, delayed=False):
        folder = pathlib.Path(tempfile.mkdtemp(dir=self.scratch)) / "kernels"
        shutil.copytree(self.kernels, folder)
        for mutation in mutations:
            apply(mutation, folder)
        if delayed:
            delayed_sources.delay(folder)
        return folder

    def run(self, name, folder, command, record):
        """(exit code, or None after a timeout; what the command wrote to `record`, or {})."""
        # Caches of its own, so that no broken kernel gets into the user's.
        names = {"TESSERA_KERNEL_SOURCES": str(folder), "TESSERA_CACHE_DIR": f"{self.scratch}/cache",
                 "CUDA_CACHE_PATH": f"{self.scratch}/driver", "TESSERA_NO_TUNING": "1",
                 "TESSERA_CODE_ARCH": "", "NO_COLOR": "1"}
        record.unlink(missing_ok=True)
        with open(self.out / f"{name}.txt", "w") as log:
            try:
                code = subprocess.run([str(c) for c in command], stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                                      env=os.environ | names, timeout=TIMEOUT_S).returncode
            except subprocess.TimeoutExpired:
                return None, {}
        try:
            return code, json.loads(record.read_text())
        except (OSError, ValueError):
            return code, {}

    # Each check returns (bad, of, a note): bad of `of` results are wrong.
    def gate(self, label, folder, m):
        record = self.out / f"{label}.json"
        code, found = self.run(label, folder, [self.tessera, "compile", "--arch", m.compile[0], "--kernel",
                                               m.compile[1], "--json", record], record)
        rows = found.get("rows", [])
        broken = [row for row in rows if row["registers"] < 0]
        if broken or not rows:
            return 0, 0, "does not compile" if broken else f"compile exited with {code}"
        bad = [row["failure"].splitlines()[0] for row in rows if not row["passed"]]
        return len(bad), len(rows), bad[0] if bad else ""

    def verify(self, label, folder, m):
        record = self.out / f"{label}.json"
        code, found = self.run(label, folder, [
            self.tessera, "verify", "--device", "cuda", "--arch-code", m.arch_code, "--suite", m.verify[0],
            "--filter", m.verify[1], "--repeat", m.repeat, "--json", record], record)
        if code is None:
            return 1, 1, f"did not finish within {TIMEOUT_S} s"
        cases = found.get("cases", [])
        served = [c for c in cases if c.get("kernel") == m.kernel]
        if not served:
            why = next((c["detail"].splitlines()[0] for c in cases if c.get("detail")), f"verify exited with {code}")
            others = {c.get("kernel", "") for c in cases} - {""}
            return 0, 0, f"{m.kernel} served no case, but {', '.join(sorted(others))}" if others else why
        bad = [c["detail"].splitlines()[0] for c in served if c["outcome"] == "failed"]
        return len(bad), len(served), bad[0] if bad else ""

    def bench(self, label, folder, m):
        record = self.out / f"{label}.json"
        code, found = self.run(label, folder, [
            self.tessera, "bench", "--device", "cuda", "--arch-code", m.arch_code, "--check", "--suite", m.bench[0],
            "--filter", m.bench[1], "--min-time", "0.01", "--json", record], record)
        rows = [c for c in found.get("cases", []) if "refused" not in c]
        bad = [c["wrong"] for c in rows if "wrong" in c]
        # A wrong row must not be timed, and must make the command fail.
        if bad and (code != 1 or any("wrong" in c and "median_s" in c for c in rows)):
            return 0, len(rows), f"rows are wrong, but bench exited with {code} or timed them"
        return len(bad), len(rows), "" if rows else f"bench exited with {code}"

    def cuda_test(self, label, folder, m):
        record = self.out / f"{label}.json"
        program = self.tessera.parent / "cuda_test"
        if not program.is_file():
            return 0, 0, f"no {program}"
        code, found = self.run(label, folder, [program, f"--gtest_filter={m.gtest}", f"--gtest_output=json:{record}"],
                               record)
        tests = [t for suite in found.get("testsuites", []) for t in suite["testsuite"] if t["result"] == "COMPLETED"]
        return sum("failures" in t for t in tests), len(tests), "" if tests else f"cuda_test exited with {code}"

    def peers(self, label, folder, _):
        record = self.out / f"{label}.json"
        path = pathlib.Path(self.scratch) / "path"  # tessera itself need not be installed
        if not path.exists():
            shutil.copytree(ROOT / "python/tessera/bench", path / "tessera_bench")
        code, found = self.run(label, folder, [
            "env", f"PYTHONPATH={path}", self.python, "-m", "tessera_bench", "--suite", "toy", "--peers", "none",
            "--rounds", "3", "--library", self.tessera.parent.parent / "lib/libtessera.so", "--json", record], record)
        rows = [r for row in found.get("rows", []) for r in row["entrants"].values()]
        bad = [r for r in rows if r["status"] == "wrong"]
        if bad and code != 1:
            return 0, len(rows), f"rows are wrong, but the benchmark exited with {code}"
        return len(bad), len(rows), "" if rows else f"the benchmark exited with {code}"

    def control(self, check, m, key):
        """A note if the check fails on unchanged kernels, else "". Each command runs once, for all mutations."""
        with self.lock:
            mine = concurrent.futures.Future()
            said = self.controls.setdefault((check.__name__,) + key, mine)
            label = f"control_{len(self.controls)}_{check.__name__}"
        if said is mine:
            try:
                bad, of, note = check(label, self.copy((), m.delayed), m)
                mine.set_result(f"{bad} of {of} fail on unchanged kernels: {note}" if bad or not of else "")
            except BaseException as problem:
                mine.set_exception(problem)
        return said.result()

    def judge(self, m, folder, steps):
        """A row of the table; caught is whether every step caught the mutation."""
        row = {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": True, "notes": []}
        for check, key in steps:
            bad, of, note = check(f"{m.name}_{check.__name__}", folder, m)
            row[check.__name__] = [bad, of]
            control = self.control(check, m, key)
            row["caught"] &= bad > 0 and not control
            row["notes"] += [text for text in (control, note) if text]
        if m.excuse and not row["caught"]:
            row.update(caught=None, notes=[m.excuse])
        return row


def race_of(m):
    return "race, late warps" if m.delayed else "race" if m.race else ""


def steps_of(checks, m):
    if m.gate:
        yield checks.gate, m.compile
        return
    if m.verify:
        yield checks.verify, (m.kernel, m.arch_code, m.verify, m.repeat, m.delayed)
    if m.bench:
        yield checks.bench, (m.arch_code, m.bench)
    if m.gtest:
        yield checks.cuda_test, (m.gtest,)


def number(arch):
    return int("".join(c for c in arch if c.isdigit()) or 0)


def sees_gpu(python):
    code = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([python, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def table(rows):
    lines = [("mutation", "kernel", "", "failed/run", "bench wrong/rows", "caught", "")]
    for row in rows:
        figures = ["{}/{}".format(*row[c]) if c in row else "" for c in ("verify", "bench")]
        for other in ("cuda_test", "gate", "peers"):
            if other in row:
                found = "{}/{} ({})".format(*row[other], other.replace("_", " "))
                figures[other == "peers"] += f", {found}" if figures[other == "peers"] else found
        caught = "-" if row["caught"] is None else "yes" if row["caught"] else "NO"
        note = row["notes"][0] if row["notes"] else ""
        lines.append((row["mutation"], row["kernel"], row["race"], *figures, caught, note[:100]))
    widths = [max(len(line[i]) for line in lines) for i in range(6)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(line, widths)), line[6]]).rstrip() for line in lines)


def batches_of(chosen, kernels):
    """Mutations that one compilation can show to compile: of the same instance, and none in another's way."""
    batches = []
    for m in chosen:
        texts = {m.file: edited(m, (kernels / m.file).read_text())}  # it must fit the sources as they are
        for batch, mutated in batches:
            if m.gate or batch[0].gate or batch[0].compile != m.compile:
                continue
            try:
                texts = {m.file: edited(m, mutated.get(m.file, (kernels / m.file).read_text()))}
            except Misfit:
                continue
            batch.append(m)
            mutated.update(texts)
            break
        else:
            batches.append(([m], texts))
    return [batch for batch, _ in batches]


def compile_all(checks, chosen, jobs):
    def gate(batch):
        """[(mutation, what the gate said)]; a batch that does not compile is tried one by one."""
        said = checks.gate(f"{batch[0].name}_compile", checks.copy(batch, any(m.delayed for m in batch)), batch[0])
        if said[1] > 0 or len(batch) == 1:
            return [(m, said) for m in batch]
        return [pair for m in batch for pair in gate([m])]

    rows = []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for m, (bad, of, note) in itertools.chain.from_iterable(pool.map(gate, batches_of(chosen, checks.kernels))):
            good = of > 0 and (bad > 0 or not m.gate)
            rows.append(good)
            print(f"{'ok' if good else 'FAILED':<7} {m.name}: {of} compiled"
                  f"{', the gate reports: ' + note if m.gate and bad else ''}"
                  f"{'' if good else '; ' + (note or 'the compile gate passes')}", flush=True)
    return 0 if all(rows) else 1


def break_all(checks, chosen, arch, with_peers, jobs):
    """Runs several at once: compiling takes most of the time, and a busy GPU makes races more likely."""
    work = []  # (mutation, its sources, its steps); no sources if it needs another architecture
    for m in chosen:
        fits = number(m.compile[0]) <= number(arch) and (m.compile[0] != "sm_90a" or arch == "sm_90a")
        work.append((m, checks.copy((m,), m.delayed) if fits else None, list(steps_of(checks, m))))
    if with_peers:
        everything = Mutation("every_kernel_skips_a_tile", "", (), (), "as chosen")
        work.append((everything, checks.copy([m for m in MUTATIONS if m.name in PEERS]), [(checks.peers, ())]))

    def judge(m, folder, steps):
        if folder is None:
            return {"mutation": m.name, "kernel": m.kernel, "race": race_of(m), "caught": None,
                    "notes": [f"needs {m.compile[0]}, this is {arch}"]}
        row = checks.judge(m, folder, steps)
        print(table([row]).splitlines()[1], flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        rows = list(pool.map(lambda item: judge(*item), work))
    text = table(rows)
    (checks.out / "break_kernels.json").write_text(json.dumps({"arch": arch, "rows": rows}, indent=1) + "\n")
    (checks.out / "break_kernels.txt").write_text(text + "\n")
    missed = sum(row["caught"] is False for row in rows)
    ran = sum(row["caught"] is not None for row in rows)
    print(f"\n{text}\n\n{ran - missed} of {ran} caught on {arch}; {len(rows) - ran} more do not count")
    return 1 if missed or not ran else 0


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", metavar="OUT", type=pathlib.Path, help="folder for the table and all output")
    parser.add_argument("--list", action="store_true", help="list the mutations and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME",
                        help="run only this mutation; may be repeated")
    parser.add_argument("--delayed", action="store_true", help="warps are late at random for every race, not only for those "
                        "that are not seen otherwise")
    parser.add_argument("--compile", action="store_true",
                        help="without a GPU: check that each mutation matches its source and compiles, and that the "
                        "compile gate fails if it should")
    parser.add_argument("--tessera", default=ROOT / "build/bin/tessera", metavar="PATH",
                        help="default: build/bin/tessera")
    parser.add_argument("--kernels", default=ROOT / "kernels", metavar="DIR", help="sources to copy and change")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), metavar="N",
                        help="mutations at a time; default: half of the cores, %(default)s here")
    parser.add_argument("--python", default=sys.executable, metavar="PATH",
                        help="a Python with PyTorch, for the comparison with peers; default: this one")
    options = parser.parse_args(arguments)
    if options.list:
        for m in MUTATIONS:
            print(f"{m.name:<42} {m.file}{'  race' if m.race else ''}{'  compile gate' if m.gate else ''}")
        return 0
    unknown = set(options.only) - {m.name for m in MUTATIONS}
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: 1 or more")
    if unknown or options.out is None:
        parser.error(f"--only {min(unknown)}: --list shows the names" if unknown else "OUT is missing")
    chosen = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.delayed:
        chosen = [dataclasses.replace(m, delayed=m.race) for m in chosen]
    options.out.mkdir(parents=True, exist_ok=True)
    options.out = options.out.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(options, scratch)
        try:
            if options.compile:
                return compile_all(checks, chosen, options.jobs)
            record = options.out / "doctor.json"
            _, found = checks.run("doctor", "", [options.tessera, "doctor", "--json", record], record)
            devices = found.get("cuda", {}).get("devices", [])
            if not devices:
                print("error: no GPU here; --compile needs none", file=sys.stderr)
                return 3
            with_peers = not options.only and sees_gpu(options.python)
            return break_all(checks, chosen, devices[0]["arch"], with_peers, options.jobs)
        except (Misfit, delayed_sources.Misfit) as problem:
            print(f"error: {problem}", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main())
