// A mask as every attention kernel takes it: a band of keys around each query.
#pragma once

namespace tessera {

// A sequence's query i stands at key i + offset and sees keys from position - left to position + right.
struct Band {
  int left;   // kUnbounded: all
  int right;  // likewise; 0 where causal
  bool bottom_right;
};
constexpr int kUnbounded = 1 << 30;

}  // namespace tessera
