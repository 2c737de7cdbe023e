#include "verify/attention/family.h"

#include "attention/backward_preprocess.h"
#include "attention/family.h"
#include "base/format.h"
#include "cuda/memory.h"
#include "verify/attention/flags.h"

namespace tessera::verify {
namespace {

using cuda::DeviceBuffer;
using Memory = std::vector<DeviceBuffer>;

constexpr unsigned short kHalfInFp16 = 0x3800;  // 0.5; about 3e-5 as bf16: any finite number is good enough

Result<std::shared_ptr<Memory>> allocate(int device, const std::vector<std::size_t>& sizes) {
  auto memory = std::make_shared<Memory>();
  for (const std::size_t bytes : sizes) {
    Result<DeviceBuffer> made = DeviceBuffer::make(device, bytes);
    if (!made.ok()) return made.status();
    if (Status s = made->fill_words16(kHalfInFp16); !s.ok()) return s;
    memory->push_back(std::move(*made));
  }
  return memory;
}

// [batch, seq, heads, dim], compact.
TensorView view_of(const DeviceBuffer& b, std::int64_t seq, std::int64_t heads, std::int64_t dim) {
  return {b.data(), seq * heads * dim, heads * dim, dim};
}
RowView rows_of(const DeviceBuffer& b, std::int64_t seq, std::int64_t heads) {
  return {b.as<float>(), heads * seq, seq};
}

// As in a backward of 16,384 tokens; heads times head dim is about 2,048.
Result<StepRun> preprocess(int device, DType dtype, std::int64_t dim) {
  attention::PreprocessArgs a;
  a.dtype = dtype;
  a.batch = 8;
  a.seq = 2048;
  a.heads = 2048 / dim;
  a.head_dim = dim;
  const auto rows = static_cast<std::size_t>(a.batch * a.seq * a.heads);
  const std::size_t bytes = rows * static_cast<std::size_t>(dim) * 2;
  const auto memory = allocate(device, {bytes, bytes, rows * 4, rows * 4, rows * 4});
  if (!memory.ok()) return memory.status();
  const Memory& m = **memory;
  a.o = view_of(m[0], a.seq, a.heads, dim);
  a.d_o = view_of(m[1], a.seq, a.heads, dim);
  a.lse = rows_of(m[2], a.seq, a.heads);
  a.delta = rows_of(m[3], a.seq, a.heads);
  a.lse_log2 = rows_of(m[4], a.seq, a.heads);
  const auto launch = attention::preprocess_launch(a);
  if (!launch.ok()) return launch.status();
  return StepRun{launch->instance.name, attention::preprocess_bytes(a), [device, a, held = *memory](void* stream) {
                   return attention::backward_preprocess(device, a, static_cast<cuda::CUstream>(stream));
                 }};
}

std::vector<StepCase> steps() {
  std::vector<StepCase> list;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const std::int64_t dim : {64, 80, 128, 256}) {
      list.push_back({format("backward_preprocess/{}/d{}", name_of(dtype), dim),
                      [=](int device) { return preprocess(device, dtype, dim); }});
    }
  }
  return list;
}

}  // namespace

const Family& attention_family() {
  static const Family family = {
      AttentionFamily::kName,
      "--sq 4096 --d 80 --causal\n"
      "--op decode --b 16 --sq 1 --sk 8192 --hq 32 --hkv 8 --d 128 --page-size 64 --arch sm_80\n"
      "--op backward --sq 512 --sk 2048 --causal bottom_right --arch cpu,sm_75,sm_90a\n"
      "--b 2 --sq 8192 --hq 16 --d 128 --causal --arch cuda:0",
      cases::suite_names,
      [](std::string_view name) { return as_cases(cases::suite(name), attention_case); },
      attention_flags,
      described_attention,
      explain_attention,
      engine::gate_instances<AttentionFamily>,
      random_attention,
      steps,
  };
  return family;
}

}  // namespace tessera::verify
