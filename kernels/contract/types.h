// The few types that the host and the kernels both speak. No header of the standard library: NVRTC has none.
#pragma once

namespace tessera {

using Index = long long;  // every offset and extent that a large tensor could push past 2^31

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
