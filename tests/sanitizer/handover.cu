// What racecheck makes of four ways to hand shared memory from some warps of a block to others, each correct:
//
//   nvcc -arch=sm_90 handover.cu -o handover
//   compute-sanitizer --tool racecheck ./handover block      __syncthreads
//   compute-sanitizer --tool racecheck ./handover named      bar.arrive by those who write, bar.sync by those who read
//   compute-sanitizer --tool racecheck ./handover mbarrier   a pair of mbarriers, full and empty
//   compute-sanitizer --tool racecheck ./handover lane       the same, one lane arriving for its warp after __syncwarp
//
// A step ends with __syncthreads in the first two, so that no write can meet a read of the step before.
#include <cstdio>
#include <cstring>

constexpr int kHalf = 128;
constexpr int kPlaces = 4;

__device__ void drift(unsigned& sum, int count) {
  for (int i = 0; i < count; ++i) sum = sum * 3 + 1;
}

__global__ void by_block(int steps, unsigned* out) {
  __shared__ unsigned x[kPlaces][kHalf];
  const int t = threadIdx.x % kHalf;
  unsigned sum = 0;
  for (int step = 0; step < steps; ++step) {
    for (int place = 0; place < kPlaces; ++place) {
      if (threadIdx.x < kHalf) {
        drift(sum, (t / 32 + step) % 7);
        x[place][t] = step + t;
      }
      __syncthreads();
      if (threadIdx.x >= kHalf) sum += x[place][t ^ 33];
    }
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void by_named(int steps, unsigned* out) {
  __shared__ unsigned x[kPlaces][kHalf];
  const int t = threadIdx.x % kHalf;
  unsigned sum = 0;
  for (int step = 0; step < steps; ++step) {
    for (int place = 0; place < kPlaces; ++place) {
      if (threadIdx.x < kHalf) {
        drift(sum, (t / 32 + step) % 7);
        x[place][t] = step + t;
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + place) : "memory");
      } else {
        asm volatile("bar.sync %0, 256;" ::"r"(1 + place) : "memory");
        sum += x[place][t ^ 33];
      }
    }
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__device__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.b32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

template <bool one_lane>
__global__ void by_mbarrier(int steps, unsigned* out) {
  __shared__ unsigned x[kPlaces];
  __shared__ unsigned long long full[kPlaces], empty[kPlaces];
  const auto address = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPlaces; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(full + i)) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(empty + i)), "r"(one_lane ? kHalf / 32 : kHalf)
                   : "memory");
    }
  }
  __syncthreads();
  unsigned sum = 0;
  for (int n = 0; n < steps * kPlaces; ++n) {
    const int place = n % kPlaces;
    const unsigned parity = n / kPlaces % 2;
    if (threadIdx.x == 0) {
      wait(address(empty + place), parity ^ 1);
      x[place] = n;
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(full + place)) : "memory");
    } else if (threadIdx.x >= kHalf) {
      wait(address(full + place), parity);
      sum += x[place];
      if (one_lane) __syncwarp();
      if (!one_lane || threadIdx.x % 32 == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(empty + place)) : "memory");
      }
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int argc, char** argv) {
  constexpr int kBlocks = 64;
  const char* const way = argc > 1 ? argv[1] : "";
  unsigned* out = nullptr;
  cudaMalloc(&out, kBlocks * 2 * kHalf * sizeof *out);
  for (int run = 0; run < 20; ++run) {
    if (std::strcmp(way, "block") == 0) {
      by_block<<<kBlocks, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "named") == 0) {
      by_named<<<kBlocks, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "mbarrier") == 0) {
      by_mbarrier<false><<<kBlocks, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "lane") == 0) {
      by_mbarrier<true><<<kBlocks, 2 * kHalf>>>(50, out);
    } else {
      std::puts("usage: handover block|named|mbarrier|lane");
      return 2;
    }
  }
  std::printf("%s: %s\n", way, cudaGetErrorString(cudaDeviceSynchronize()));
}
