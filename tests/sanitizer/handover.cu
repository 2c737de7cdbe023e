// What racecheck reports for four ways to hand shared memory from some warps of a CTA to others. All four are correct:
//
//   nvcc -arch=sm_90 handover.cu -o handover
//   compute-sanitizer --tool racecheck ./handover block      __syncthreads
//   compute-sanitizer --tool racecheck ./handover named      bar.arrive by the writers, bar.sync by the readers
//   compute-sanitizer --tool racecheck ./handover mbarrier   two mbarriers per stage, full and empty
//   compute-sanitizer --tool racecheck ./handover lane       the same, but one lane arrives for its warp
//
// In the first two, a step ends with __syncthreads, so that no write can race with a read of the previous step.
#include <cstdio>
#include <cstring>

constexpr int kHalf = 128;
constexpr int kStages = 4;

__device__ void drift(unsigned& sum, int count) {
  for (int i = 0; i < count; ++i) sum = sum * 3 + 1;
}

__global__ void by_cta(int steps, unsigned* out) {
  __shared__ unsigned x[kStages][kHalf];
  const int t = threadIdx.x % kHalf;
  unsigned sum = 0;
  for (int step = 0; step < steps; ++step) {
    for (int stage = 0; stage < kStages; ++stage) {
      if (threadIdx.x < kHalf) {
        drift(sum, (t / 32 + step) % 7);
        x[stage][t] = step + t;
      }
      __syncthreads();
      if (threadIdx.x >= kHalf) sum += x[stage][t ^ 33];
    }
    __syncthreads();
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void by_named(int steps, unsigned* out) {
  __shared__ unsigned x[kStages][kHalf];
  const int t = threadIdx.x % kHalf;
  unsigned sum = 0;
  for (int step = 0; step < steps; ++step) {
    for (int stage = 0; stage < kStages; ++stage) {
      if (threadIdx.x < kHalf) {
        drift(sum, (t / 32 + step) % 7);
        x[stage][t] = step + t;
        asm volatile("bar.arrive %0, 256;" ::"r"(1 + stage) : "memory");
      } else {
        asm volatile("bar.sync %0, 256;" ::"r"(1 + stage) : "memory");
        sum += x[stage][t ^ 33];
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
  __shared__ unsigned x[kStages];
  __shared__ unsigned long long full[kStages], empty[kStages];
  const auto address = [](const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); };
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(full + i)) : "memory");
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(empty + i)),
                   "r"(one_lane ? kHalf / 32 : kHalf)
                   : "memory");
    }
  }
  __syncthreads();
  unsigned sum = 0;
  for (int n = 0; n < steps * kStages; ++n) {
    const int stage = n % kStages;
    const unsigned parity = n / kStages % 2;
    if (threadIdx.x == 0) {
      wait(address(empty + stage), parity ^ 1);
      x[stage] = n;
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(full + stage)) : "memory");
    } else if (threadIdx.x >= kHalf) {
      wait(address(full + stage), parity);
      sum += x[stage];
      if (one_lane) __syncwarp();
      if (!one_lane || threadIdx.x % 32 == 0) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address(empty + stage)) : "memory");
      }
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

int main(int argc, char** argv) {
  constexpr int kCtas = 64;
  const char* const way = argc > 1 ? argv[1] : "";
  unsigned* out = nullptr;
  cudaMalloc(&out, kCtas * 2 * kHalf * sizeof *out);
  for (int run = 0; run < 20; ++run) {
    if (std::strcmp(way, "block") == 0) {
      by_cta<<<kCtas, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "named") == 0) {
      by_named<<<kCtas, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "mbarrier") == 0) {
      by_mbarrier<false><<<kCtas, 2 * kHalf>>>(50, out);
    } else if (std::strcmp(way, "lane") == 0) {
      by_mbarrier<true><<<kCtas, 2 * kHalf>>>(50, out);
    } else {
      std::puts("usage: handover block|named|mbarrier|lane");
      return 2;
    }
  }
  std::printf("%s: %s\n", way, cudaGetErrorString(cudaDeviceSynchronize()));
}
