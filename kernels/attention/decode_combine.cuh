// Combines the partial results of attention/decode.cuh:
//
//   LSE = log sum_s exp(lse_s),   O = sum_s exp(lse_s - LSE) * o_s
//
// A CTA has one row of a row block or, if there are many, several. It finds out which CTAs of the main kernel have shared
// the rows' keys, from the same lengths, while that kernel still runs. If one CTA had all of them, it has written the
// result itself. Each group of Dv / 4 threads adds up its share of a row's parts, 16 bytes a lane, ten at a time; a
// row's groups are then added up in order, so that the result does not change from run to run.
//
// Whatever does not depend on the parts is computed before they are waited for: of a short call's time, a good part is what
// follows the main kernel.
//
// Entry point: decode_combine, at the end of this file.
#pragma once

#include "attention/decode_schedule.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace tessera {

// The partial results of one row: `count` slots from `first` on, `step` apart.
struct DecodeParts {
  int first;
  int step;
  int count;
  bool first_is_apart;  // the first CTA's part is in its second slot
};

__forceinline__ DecodeParts parts_of(const DecodeSchedule& s, int batch, int column) {
  const int units = sequence_of(s, batch).units(s);
  if (s.every_unit) return {static_cast<int>(partial_slot(s, 0, true, batch, column, 0)), 1, units, false};
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
  return {static_cast<int>(partial_slot(s, first, false, batch, column, 0)), 2, static_cast<int>(last - first) + 1,
          true};
}

// Computes the value here, not where it is used.
template <class T>
__forceinline__ void compute_now(T& value) {
  if constexpr (sizeof(T) == 8) {
    asm volatile("" : "+l"(value));
  } else {
    asm volatile("" : "+r"(value));
  }
}

// The weight of a part with this LSE; 0 for -inf. reference: not -inf.
__forceinline__ float weight_of(float lse, float reference) { return fast_exp2((lse - reference) * kLog2E); }
__forceinline__ float finite_reference(float largest) { return largest == -infinity() ? 0.0f : largest; }

template <DecodeCombineConfig config>
struct DecodeCombine {
  static constexpr int kLanes = config.dim_v / 4;  // of a group
  static constexpr int kGroups = config.threads / kLanes;
  static constexpr int kAtOnce = 10;  // parts that are loaded together
  static_assert(config.dim_v % 4 == 0 && kGroups >= 1);

  const DecodeCombineParams& p;
  // Of this thread:
  const float* o_at;  // its columns of the group's next part
  const float* lse_at;
  int left;   // parts from that one on, to the row's last
  int step;   // from each of the group's parts to the next, in rows
  int apart;  // rows that the next part is behind its place
  float m = -infinity(), l = 0, o[4] = {};

  __forceinline__ void run() {
    __shared__ __align__(16) float shared_o[kGroups][config.dim_v];
    __shared__ float shared_m[kGroups], shared_l[kGroups];
    __shared__ Index place_of_o[kGroups], place_of_lse[kGroups];  // of the group's row; registers are scarce
    const DecodeSchedule& s = p.schedule;
    const int column = blockIdx.x % s.columns, batch = blockIdx.x / s.columns;
    const DecodeParts parts = parts_of(s, batch, column);

    // Groups of one row are adjacent. Threads beyond the last group have nothing to do.
    const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    int groups = kGroups / p.rows_together;  // of a row
    const int local = blockIdx.y * p.rows_together + group / groups, first_part = group % groups;
    const int head_kv = static_cast<int>(p.row_blocks.quotient(column));
    const int row = (column - head_kv * static_cast<int>(p.row_blocks.by)) * p.rows_per_block + local;
    const bool active = group < groups * p.rows_together && local < p.rows_per_block && row < p.rows;
    if (active && lane == 0) {
      const int in_group = static_cast<int>(s.seq_q.quotient(row));
      const int head = head_kv * p.group + in_group, query = row - in_group * static_cast<int>(s.seq_q.by);
      place_of_o[group] = batch * p.o_strides.batch + query * p.o_strides.seq + head * p.o_strides.head;
      place_of_lse[group] = batch * p.lse_strides.batch + head * p.lse_strides.head + query;
    }
    apart = first_part == 0 && parts.first_is_apart ? p.rows_per_block : 0;
    const Index at = static_cast<Index>(parts.first + first_part * parts.step) * p.rows_per_block + apart + local;
    o_at = p.o_partial + at * config.dim_v + lane * 4;
    lse_at = p.lse_partial + at;
    step = parts.step * groups * p.rows_per_block;
    left = parts.count - first_part;
    compute_now(groups);
    compute_now(o_at);
    compute_now(lse_at);
    compute_now(step);
    compute_now(left);
    compute_now(apart);
    pdl_wait_and_launch_dependents();
    if (parts.count == 1) return;
    if (active) {
      while (left > 0) add_parts(groups);
      store_shared_floats(shared_address(shared_o[group]) + lane * 16, o[0], o[1], o[2], o[3]);
      if (lane == 0) {
        shared_m[group] = m;
        shared_l[group] = l;
      }
    }
    __syncthreads();
    if (!active || first_part != 0) return;
    add_groups(groups, shared_address(shared_o[group]) + lane * 16, shared_m + group, shared_l + group);
    store_result(static_cast<Bits16*>(p.o) + place_of_o[group] + lane * 4);
    if (p.lse && lane == 0) p.lse[place_of_lse[group]] = l == 0.0f ? -infinity() : m + fast_log2(l) * kLn2;
  }

  // Adds the group's next kAtOnce parts, or what is left of them.
  __forceinline__ void add_parts(int groups) {
    float lse[kAtOnce];
    Words4 words[kAtOnce];
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const bool wanted = u * groups < left;
      const float loaded = load_read_only(lse_at, wanted);
      lse[u] = wanted ? loaded : -infinity();
      words[u] = load_streaming_16(o_at, wanted);
      const int on = u == 0 ? step - apart : step;
      lse_at += on;
      o_at += static_cast<Index>(on) * config.dim_v;
    }
    left -= kAtOnce * groups;
    apart = 0;
    float next = m;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) next = fmaxf(next, lse[u]);
    const float reference = finite_reference(next);
    const float kept = weight_of(m, reference);
    m = next;
    l *= kept;
#pragma unroll
    for (int i = 0; i < 4; ++i) o[i] *= kept;
#pragma unroll
    for (int u = 0; u < kAtOnce; ++u) {
      const float weight = weight_of(lse[u], reference);
      l += weight;
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] += weight * float_from_bits(words[u].word[i]);
    }
  }

  // The sums of a row's groups, from shared memory: addresses of the first. Few are added without branches.
  __forceinline__ void add_groups(int groups, unsigned group_o, const float* group_m, const float* group_l) {
    constexpr bool kFew = kGroups <= 4;
    constexpr int kUnroll = kFew ? kGroups : 1;
    const int most = kFew ? kGroups : groups;
    const auto m_of = [&](int g) { return g < groups ? group_m[g] : -infinity(); };
    m = -infinity();
#pragma unroll kUnroll
    for (int g = 0; g < most; ++g) m = fmaxf(m, m_of(g));
    const float reference = finite_reference(m);
    l = o[0] = o[1] = o[2] = o[3] = 0;
#pragma unroll kUnroll
    for (int g = 0; g < most; ++g) {
      const int there = g < groups ? g : 0;
      const float weight = weight_of(m_of(g), reference);
      float part[4];
      load_shared_floats(part, group_o + there * config.dim_v * 4);
      l += weight * group_l[there];
#pragma unroll
      for (int i = 0; i < 4; ++i) o[i] += weight * part[i];
    }
  }

  __forceinline__ void store_result(Bits16* out) const {
    const float scale = l == 0.0f ? 0.0f : fast_reciprocal(l);
    const Words2 pairs = {
        {pack<config.dtype>(o[0] * scale, o[1] * scale), pack<config.dtype>(o[2] * scale, o[3] * scale)}};
    if (reinterpret_cast<unsigned long long>(out) % 8 == 0) {
      store_8(out, pairs);
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = static_cast<Bits16>(pairs.word[i / 2] >> i % 2 * 16);
  }
};

template <DecodeCombineConfig config>
__forceinline__ void decode_combine(const DecodeCombineParams& p) {
  DecodeCombine<config>{p}.run();
}

}  // namespace tessera
