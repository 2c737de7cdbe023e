// Combines the partial results of attention/decode.cuh:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s exp(lse_s - LSE) * o_s
//
// A CTA has one row of a row block or, if there are many, several. It finds out which CTAs of the main kernel have shared
// the rows' keys, from the same lengths, while that kernel still runs. If one CTA had all of them, it has written the
// result itself. Each group of Dv / 4 threads adds up its share of a row's parts, 16 bytes a lane, four at a time; a
// row's groups are then added up in order, so that the result does not change from run to run.
//
// Entry point: decode_combine, at the end of this file.
#pragma once

#include "attention/decode_schedule.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"

namespace tessera {

// The partial results of one row: `count` slots from `first` on, `step` apart.
struct DecodeParts {
  Index first;
  Index step;
  int count;
  bool first_is_apart;  // the first CTA's part is in its second slot

  __forceinline__ Index slot(int part) const { return part == 0 && first_is_apart ? first + 1 : first + part * step; }
};

__forceinline__ DecodeParts parts_of(const DecodeSchedule& s, int batch, int column) {
  const int units = sequence_of(s, batch).units(s);
  if (s.every_unit) return {partial_slot(s, 0, true, batch, column, 0), 1, units, false};
  unsigned all = 0, before = 0;
  for (int b = threadIdx.x % 32; b < s.batch; b += 32) {
    const unsigned cost = sequence_of(s, b).cost(s);
    all += cost;
    before += b < batch ? cost : 0;
  }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    all += __shfl_xor_sync(0xffffffffu, all, step);
    before += __shfl_xor_sync(0xffffffffu, before, step);
  }
  const DecodeShares shares(s, all * s.columns);
  const unsigned first_unit = before * s.columns + column * (units + s.end_cost);
  const unsigned first = shares.owner_of(first_unit), last = shares.owner_of(first_unit + units - 1);
  return {partial_slot(s, first, false, batch, column, 0), 2, static_cast<int>(last - first) + 1, true};
}

template <DecodeCombineConfig config>
__forceinline__ void decode_combine(const DecodeCombineParams& p) {
  constexpr int kLanes = config.dim_v / 4;  // of a group
  constexpr int kGroups = config.threads / kLanes;
  constexpr int kUnroll = 10;  // parts that are loaded at once
  static_assert(config.dim_v % 4 == 0 && kGroups >= 1);
  __shared__ float shared_o[kGroups][config.dim_v];
  __shared__ float shared_m[kGroups];
  __shared__ float shared_l[kGroups];

  const DecodeSchedule& s = p.schedule;
  const int column = blockIdx.x % s.columns, batch = blockIdx.x / s.columns;
  const DecodeParts parts = parts_of(s, batch, column);
  pdl_wait_and_launch_dependents();
  if (parts.count == 1) return;

  // Groups of one row are adjacent. Threads beyond the last group have nothing to do.
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int groups = kGroups / p.rows_together;  // of a row
  const int local = blockIdx.y * p.rows_together + group / groups, first_part = group % groups;
  const int head_kv = static_cast<int>(p.row_blocks.quotient(column));
  const int row = (column - head_kv * static_cast<int>(p.row_blocks.by)) * p.rows_per_block + local;
  const bool active = group < groups * p.rows_together && local < p.rows_per_block && row < p.rows;
  float m = -infinity(), l = 0, o[4] = {};
  if (active) {
    for (int begin = first_part; begin < parts.count; begin += kUnroll * groups) {
      float lse[kUnroll];
      Words4 words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int part = begin + u * groups;
        const bool wanted = part < parts.count;
        const Index at = (wanted ? parts.slot(part) : 0) * p.rows_per_block + local;
        const float loaded = load_read_only(p.lse_partial + at, wanted);
        lse[u] = wanted ? loaded : -infinity();
        words[u] = load_streaming_16(p.o_partial + at * config.dim_v + lane * 4, wanted);
      }
      float next = m;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) next = fmaxf(next, lse[u]);
      const float keep = m == -infinity() ? 0.0f : fast_exp2((m - next) * kLog2E);
      m = next;
      l *= keep;
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] *= keep;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const float weight = lse[u] == -infinity() ? 0.0f : fast_exp2((lse[u] - next) * kLog2E);
        l += weight;
#pragma unroll
        for (int i = 0; i < 4; ++i) o[i] += weight * float_from_bits(words[u].word[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) shared_o[group][lane * 4 + i] = o[i];
    if (lane == 0) {
      shared_m[group] = m;
      shared_l[group] = l;
    }
  }
  __syncthreads();
  if (!active || first_part != 0) return;
  for (int g = 1; g < groups; ++g) m = fmaxf(m, shared_m[group + g]);
  l = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) o[i] = 0;
  for (int g = group; g < group + groups; ++g) {
    const float weight = shared_m[g] == -infinity() ? 0.0f : fast_exp2((shared_m[g] - m) * kLog2E);
    l += weight * shared_l[g];
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] += weight * shared_o[g][lane * 4 + i];
  }
  const float scale = l == 0.0f ? 0.0f : fast_reciprocal(l);
  const int in_group = static_cast<int>(s.seq_q.quotient(row));
  const int head = head_kv * p.group + in_group, query = row - in_group * static_cast<int>(s.seq_q.by);
  auto* out = static_cast<Bits16*>(p.o) + batch * p.o_strides.batch + query * p.o_strides.seq +
              head * p.o_strides.head + lane * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = from_float<config.dtype>(o[i] * scale);
  if (p.lse && lane == 0) {
    p.lse[batch * p.lse_strides.batch + head * p.lse_strides.head + query] =
        l == 0.0f ? -infinity() : m + fast_log2(l) * kLn2;
  }
}

}  // namespace tessera
