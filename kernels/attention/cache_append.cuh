// The step before a forward kernel that appends: writes new keys and values to the KV cache, with rotary embedding, and
// the rotated queries and the new lengths to the workspace. Memory-bound. Entry point: cache_append, below.
//
// Each CTA has a part of one sequence's rows, in 16-byte chunks. A sequence that does not fit the cache is refused: its
// cache is not touched, and its length, -1, tells the forward.
#pragma once

#include "attention/cache_append_config.h"
#include "ptx/griddepcontrol.cuh"
#include "tile/rotary.cuh"

namespace tessera {

template <CacheAppendConfig config>
struct CacheAppend {
  const CacheAppendParams& p;
  int batch;
  int length;    // before the append
  int row;       // of the cache, if not paged
  int position;  // of the first new key

  // Called by all threads of the CTA.
  __forceinline__ bool fits() const {
    const KvCache& cache = p.cache;
    bool fits = length >= 0 && length <= cache.capacity - p.seq_new && (!cache.leftpad || cache.leftpad[batch] >= 0) &&
                (!cache.batch_idx || (row >= 0 && row < cache.rows));
    if (p.rotary_dim > 0) fits &= position >= 0 && position <= p.rotary_rows - max(p.seq_new, p.seq_q);
    if (fits && cache.page_table) {
      const int first = static_cast<int>(cache.by_page.quotient(length));
      const int last = static_cast<int>(cache.by_page.quotient(length + p.seq_new - 1));
      for (int page = first + static_cast<int>(threadIdx.x); page <= last; page += config.threads) {
        const int physical = cache.page_table[batch * cache.page_table_stride + page];
        fits &= static_cast<unsigned>(physical) < static_cast<unsigned>(cache.num_pages);
      }
    }
    return __syncthreads_and(fits);
  }

  __forceinline__ Bits16* row_of(void* data, const Strides& strides, int key, int head) const {
    Bits16* const base = static_cast<Bits16*>(data) + head * strides.head;
    if (!p.cache.page_table) return base + row * strides.batch + key * strides.seq;
    const int page = static_cast<int>(p.cache.by_page.quotient(key));
    return base + p.cache.page_table[batch * p.cache.page_table_stride + page] * strides.batch +
           (key - page * static_cast<int>(p.cache.by_page.by)) * strides.seq;
  }

  __forceinline__ Words4 rotated_or_same(const Bits16* source, int chunk, int at) const {
    if (p.rotary_dim == 0) return load_chunk<config.vector>(source + chunk * 8, true);
    const auto value = [&](int column) { return to_float<config.dtype>(source[column]); };
    return rotated_chunk<config.dtype>(p, value, chunk, at);
  }

  // Calls each(row, head, chunk) for this thread's chunks of a [rows, heads, dim] tensor.
  template <class Each>
  __forceinline__ void for_chunks(int rows, int heads, int dim, const Each& each) const {
    const int chunks = dim / 8;
    const Index count = static_cast<Index>(rows) * heads * chunks;
    for (Index index = static_cast<Index>(blockIdx.x % p.ctas) * config.threads + threadIdx.x; index < count;
         index += static_cast<Index>(p.ctas) * config.threads) {
      const Index vector = index / chunks;
      each(static_cast<int>(vector / heads), static_cast<int>(vector % heads), static_cast<int>(index % chunks));
    }
  }

  __forceinline__ void run() {
    for_chunks(p.seq_new, p.heads_kv, p.dim_qk, [&](int i, int head, int chunk) {
      const Bits16* source = static_cast<const Bits16*>(p.k_new) + batch * p.k_new_strides.batch +
                             i * p.k_new_strides.seq + head * p.k_new_strides.head;
      store_chunk<config.vector>(row_of(p.k, p.k_strides, length + i, head) + chunk * 8,
                                 rotated_or_same(source, chunk, position + i));
    });
    for_chunks(p.seq_new, p.heads_kv, p.dim_v, [&](int i, int head, int chunk) {
      const Bits16* source = static_cast<const Bits16*>(p.v_new) + batch * p.v_new_strides.batch +
                             i * p.v_new_strides.seq + head * p.v_new_strides.head;
      store_chunk<config.vector>(row_of(p.v, p.v_strides, length + i, head) + chunk * 8,
                                 load_chunk<config.vector>(source + chunk * 8, true));
    });
    if (p.rotary_dim == 0) return;
    for_chunks(p.seq_q, p.heads_q, p.dim_qk, [&](int i, int head, int chunk) {
      const Bits16* source =
          static_cast<const Bits16*>(p.q) + batch * p.q_strides.batch + i * p.q_strides.seq + head * p.q_strides.head;
      Bits16* const to = static_cast<Bits16*>(p.q_rotated) +
                         ((static_cast<Index>(batch) * p.seq_q + i) * p.heads_q + head) * p.dim_qk + chunk * 8;
      store_16(to, rotated_or_same(source, chunk, position + (p.rotary_advances ? i : 0)));
    });
  }
};

template <CacheAppendConfig config>
__forceinline__ void cache_append(const CacheAppendParams& p) {
  pdl_wait_and_launch_dependents();
  const int batch = static_cast<int>(blockIdx.x / p.ctas);
  const int length = p.cache.seqlens[batch];
  CacheAppend<config> append{p, batch, length, p.cache.batch_idx ? p.cache.batch_idx[batch] : batch,
                             p.rotary_seqlens ? p.rotary_seqlens[batch] : length};
  const bool fits = append.fits();
  if (blockIdx.x % p.ctas == 0 && threadIdx.x == 0) p.lengths[batch] = fits ? length + p.seq_new : -1;
  if (fits) append.run();
}

}  // namespace tessera
