// The one list of problems. The tests, `tessera verify` and `tessera bench` all read it, so a shape that broke once is
// added here and is checked, timed and listed everywhere.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "attention/problem.h"
#include "verify/attention/oracle.h"

namespace tessera::cases {

enum class Distribution : std::uint8_t {
  kNormal,          // unit variance: logits of a few units
  kLogits120,       // logits near +120 and -120, key by key
  kLogits1e4,       // likewise near +-1e4
  kLogits1e10,      // all logits of a row equal and near 1e10: uniform weights, if nothing overflows
  kLogitsMinus120,  // all logits near -120: exp underflows unless the row's maximum is subtracted
  kSteps,           // logits fall by 30 every 64 keys: a running maximum jumps, coming from the last key
  kSink,            // the first key's logit is 200, far beyond the others
  kOneHot,          // one key (or a few equal ones) takes nearly all the weight
  kConstant,        // all keys equal: uniform weights
  kHugeValues,      // V near the top of the type's range, as far as sums of it stay finite
  kMeanValues,      // V around 2: sums of its products grow with the number of keys
};
const char* name_of(Distribution distribution);

// How tensors lie in memory; the shape is always [B, S, H, D].
enum class Layout : std::uint8_t {
  kCompact,
  kHeadsMajor,  // memory is [B, H, S, D]
  kPadded,      // 8 NaN elements after every head's vector, and some after every row and batch
  kUnaligned,   // 3 NaN elements after every head's vector: rows start at no multiple of 16 bytes
};

struct Case {
  std::string name;  // says everything that sets the case apart; unique in a suite
  AttentionProblem problem;
  std::vector<std::int32_t> lengths_q, lengths_k;  // [B], if varlen
  std::vector<std::int32_t> cache_lengths;         // [B], decode, before an append; empty: the whole cache
  std::vector<std::int32_t> cache_batch_idx;       // [B], decode, or empty
  std::vector<std::int32_t> leftpad;               // [B], decode, or empty
  std::vector<std::int32_t> rotary_lengths;        // [B], decode, or empty: cache_lengths
  std::int64_t bad_page = -1;                      // decode: the sequence whose last page does not exist
  bool with_status = false;                        // decode
  // Decode: some sequence's lengths or indices do not fit the cache. A GPU refuses that sequence; on the CPU, the call is
  // an error.
  bool refused = false;
  bool compare_alone = false;     // decode: each sequence is run alone, too, and must give the same bits
  bool slopes_per_batch = false;  // ALiBi slopes are [B, Hq] instead of [Hq]
  bool scales_per_head = true;    // fp8: else per tensor, as far as they are not per block
  bool scales_per_batch = false;  // fp8_cache: and per sequence
  double query_size = 1;          // q is multiplied by it
  int scale_exponent = 0;         // fp8: q's scales are multiplied by 2 to its power, and k's divided
  // fp8, rounded to it: 64 rows of k, and so many of v, are of another size than the next ones, and so are their scales.
  int uneven = 0;
  // decode: values are multiplied by 2 to its power, from the 256th key on; one-hot: of all but every 128th key
  int value_exponent = 0;
  Distribution distribution = Distribution::kNormal;
  Layout layout = Layout::kCompact;
  std::uint64_t seed = 1;
  std::int64_t sample = 0;  // rows and keys of each head that are checked; 0: all (oracle::Sample)
  double floor = 1;         // of the accuracy rule, in epsilons: see verify::judge
  std::vector<std::string> tags;

  // Visible (query, key) pairs of one head, summed over the batch.
  std::int64_t visible_pairs() const;
  // Multiplications and additions of the visible pairs alone: 2 products forward, 5 backward.
  double flops() const;
  // Compulsory traffic: every tensor read or written once; of a cache, the keys in use.
  double bytes() const;
  // What the textbook computation moves, with the score matrices going through memory.
  double unfused_bytes() const;
};

// "quick", "full", "hostile", "sanitize", "long", "bench" (CPU shapes), "bench-gpu", "bench-long", "evidence", "peers"
// (what the comparison with other libraries times). Empty for an unknown name.
std::vector<Case> suite(std::string_view name);
const std::vector<std::string>& suite_names();

// Small problems that the Configs of a problem fit as well, to check them on before they are timed: lengths that fill
// no tile, packed sequences (empty ones too), and enough tiles that each CTA on an H200 has more than one; with the
// problem's groups of heads, mask and score_mod.
std::vector<Case> tuning_checks(const Case& problem);

// Values from the case's seed, rounded to its type; the same on every platform. Rows that no sequence uses (behind the
// lengths, left padding, unused pages and rows of the cache) are NaN. With rotary embedding, values of q and k_new have
// so few bits that their rotation is exact in fp32: what is appended to the cache is known to the bit.
oracle::Inputs make_inputs(const Case& c);

// The same without values of q, k, v and d_o: Buffers fills them with repeating random ones, which is what time is
// measured on. Values for one large case take seconds.
oracle::Inputs make_shapes(const Case& c);

}  // namespace tessera::cases
