// Causal attention in C++: forward, then backward, on the CPU.
#include <cstdint>
#include <cstdio>
#include <random>
#include <tessera/tessera.hpp>
#include <vector>

int main() {
  const std::int64_t batch = 1, seq = 256, heads = 8, kv_heads = 2, dim = 80;
  auto random = [generator = std::mt19937(7)](std::int64_t count) mutable {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& value : values) value = normal(generator);
    return values;
  };
  const std::vector<float> q = random(batch * seq * heads * dim);
  const std::vector<float> k = random(batch * seq * kv_heads * dim);
  const std::vector<float> v = random(batch * seq * kv_heads * dim);
  const std::vector<float> dout = random(batch * seq * heads * dim);
  std::vector<float> out(q.size()), lse(static_cast<std::size_t>(batch * heads * seq));
  std::vector<float> dq(q.size()), dk(k.size()), dv(v.size());

  try {
    using tessera::kFloat32;
    tessera::Attention attention{
        .q = {q.data(), kFloat32, {batch, seq, heads, dim}},
        .k = {k.data(), kFloat32, {batch, seq, kv_heads, dim}},
        .v = {v.data(), kFloat32, {batch, seq, kv_heads, dim}},
        .out = {out.data(), kFloat32, {batch, seq, heads, dim}},
        .lse = {lse.data(), kFloat32, {batch, heads, seq}},
        .causal = true,
    };
    std::printf("%s", tessera::explain(TESSERA_ATTENTION_FORWARD, attention).c_str());
    tessera::attention_forward(attention);

    attention.dout = {dout.data(), kFloat32, {batch, seq, heads, dim}};
    attention.dq = {dq.data(), kFloat32, {batch, seq, heads, dim}};
    attention.dk = {dk.data(), kFloat32, {batch, seq, kv_heads, dim}};
    attention.dv = {dv.data(), kFloat32, {batch, seq, kv_heads, dim}};
    tessera::attention_backward(attention);
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  // The first query sees one key: its output is that key's value.
  std::printf("out[0] = %g, v[0] = %g, dq[last] = %g\n", out[0], v[0], dq.back());
  return out[0] == v[0] ? 0 : 1;
}
