// Types shared by the host and the kernels. No standard library header: NVRTC has none.
#pragma once

namespace tessera {

using Index = long long;  // for offsets and extents that may exceed 2^31 in a large tensor

enum class DType : unsigned char { kFloat32, kFloat16, kBFloat16 };

// [batch, seq, head, dim] with a contiguous last dim; in elements.
struct Strides {
  Index batch;
  Index seq;
  Index head;
};

// float [batch, head, seq] with a contiguous last dim; in elements.
struct RowStrides {
  Index batch;
  Index head;
};

}  // namespace tessera
