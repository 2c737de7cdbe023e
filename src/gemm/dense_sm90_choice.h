// How gemm/dense_sm90.cuh computes a product: the tile, the parts of K, and what is done about rows that start anywhere.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/dense_sm90_config.h"
#include "gemm/family.h"

namespace tessera::gemm::sm90 {

// How rows that TMA cannot address directly are dealt with.
struct Access {
  bool pad_a = false;          // copied to the workspace with a padded stride
  bool pad_b = false;          // and the gate
  bool shift_b = false;        // eight such copies, shifted as rows of a or out are
  int strided = kStridedNone;  // every eighth row in a tile, or in a sum
  bool out_shifted = false;    // kStridedM: rows of out start anywhere, too
  bool tma_store = true;
  bool edges = false;        // threads store what is not a whole chunk of 16 bytes
  int staged = kStagedNone;  // the epilogue's matrix that TMA moves too

  bool operator==(const Access&) const = default;
};

struct Choice {
  GemmDenseSm90Config main;
  int splits;  // parts of K
  Access access;
  bool swapped;  // the transposed product is computed: A and B are exchanged, and the last step transposes
  // The last rows, if they are computed by a launch of their own in smaller tiles: those of main fill whole rounds.
  std::int64_t rest_rows;
  GemmDenseSm90Config rest;
};

struct Tile {
  int block_m, block_n;
  bool ping_pong;
  int cluster;
  bool shares_a = false;
};

// What a tile may have to cover beside the product's own rows, columns and terms.
std::int64_t extent_m(const GemmProblem& p, const Access& access);
std::int64_t k_steps(const GemmProblem& p, const Access& access);
// Of all groups of terms.
std::int64_t all_steps(const GemmProblem& p, const Access& access);
// What the main step computes.
GemmProblem main_problem(const GemmProblem& p, const Choice& choice);
Tile tile_of(const GemmDenseSm90Config& c);
std::int64_t column_tiles(const GemmProblem& p, const Access& access, const Tile& tile);
std::int64_t row_tiles(const GemmProblem& p, const Access& access, const Tile& tile);
// Partial results: one for each part of K; where groups of terms are strided, one more for each of them but the first.
int partials_of(const Choice& choice);
struct Partial {
  std::int64_t group, part;  // of terms, of K
};
// Those that are written, in the order of their terms.
std::vector<Partial> partial_results(const GemmProblem& p, const Choice& choice);
// Rows of fp32 partial results begin at multiples of 16 bytes. Their pairs of columns may be shifted.
std::int64_t partial_columns(const GemmProblem& p, const Access& access);
std::int64_t partial_elements(const GemmProblem& p, const Access& access);
// Matrices of a, and of b: one per group, or one.
std::int64_t layers_of_a(const GemmProblem& p);
std::int64_t layers_of_b(const GemmProblem& p);
// Of the copy of b: rows, and elements from row to row. Shifted ones are read in lines of 128 bytes.
std::int64_t rows_of_b(const GemmProblem& p);
std::int64_t columns_of_b(const GemmProblem& p);
std::int64_t copied_stride(const GemmProblem& p, const Access& access);
std::int64_t copies_of_b(const GemmProblem& p, const Access& access);
// False for tiles that were no faster where they were timed; the tuner tries them, too.
bool is_offered(const GemmDenseSm90Config& config);
// Microseconds, roughly: measured on an H200.
double predicted_time(const GemmProblem& p, const engine::Device& device, const Choice& choice);
// Whether TMA can store what the epilogue writes: threads store no pairs.
bool stores_by_tma(const GemmProblem& p);
std::vector<Choice> choices_for(const GemmProblem& p, const engine::Device& device);
std::string why_of(const GemmProblem& whole, const Choice& choice);

}  // namespace tessera::gemm::sm90
