// Softcap, ALiBi and scales that are not positive in the Hopper backwards: a lane's scores, keys by queries, to
// probabilities and to what dS is computed from.
#pragma once

#include "ptx/convert.cuh"
#include "tile/mask.h"
#include "tile/probability.cuh"

namespace tessera {

// A lane has two keys, 8 apart, and two queries of each 8: value i of tile n is key i / 2, query n * 8 + i % 2 from the
// lane's first one on.
template <bool masked, int block_q>
struct ScoreMod {
  Interval<int> queries[2];  // that see each key, from the lane's first one on
  int distance[2];           // from the lane's first query to each key
  float scale, softcap, slope;

  // distance: from the position of the step's first query to the first of the tile's keys; keys: the number of keys in
  // the sequence from that one on.
  template <class Params>
  __forceinline__ ScoreMod(const Params& p, float slope_of_head, int first_distance, int keys, int first_key,
                           int first_query)
      : scale(p.scale), softcap(p.softcap), slope(slope_of_head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = first_key + half * 8;
      distance[half] = first_distance + key - first_query;
      queries[half] = {0, block_q};
      if constexpr (masked) queries[half] = p.band.template positions_of<false>(distance[half]);
      if (key >= keys) queries[half].end = queries[half].begin;
    }
  }

  // The score becomes P; returns P times the derivative of the modification.
  __forceinline__ float operator()(float& s, int n, int i, float lse_log2) const {
    const int query = n * 8 + i % 2;
    const Interval<int>& seen = queries[i / 2];
    const float derivative = modify_score(s, scale, softcap, slope, distance[i / 2] - query);
    if (query >= seen.end || (masked && query < seen.begin)) s = -infinity();
    s = probability(s, kLog2E, lse_log2);
    return s * derivative;
  }
};

}  // namespace tessera
