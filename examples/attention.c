/* Decode in C: one new query against a KV cache, with a plan that is created once and run for every token. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/attention.h>

enum { BATCH = 2, CAPACITY = 64, HEADS = 8, KV_HEADS = 2, DIM = 64 };

static float* random_floats(size_t count) {
  float* values = malloc(count * sizeof *values);
  for (size_t i = 0; values != NULL && i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
  return values;
}

static int check(tessera_status status, const char* what) {
  if (status == TESSERA_OK) return 1;
  fprintf(stderr, "%s: %s: %s\n", what, tessera_status_name(status), tessera_last_error());
  return 0;
}

int main(void) {
  float* q = random_floats((size_t)BATCH * HEADS * DIM);
  float* k = random_floats((size_t)BATCH * CAPACITY * KV_HEADS * DIM);
  float* v = random_floats((size_t)BATCH * CAPACITY * KV_HEADS * DIM);
  float* out = random_floats((size_t)BATCH * HEADS * DIM);
  int32_t lengths[BATCH] = {0, 0};
  if (q == NULL || k == NULL || v == NULL || out == NULL) return 1;

  int64_t q_shape[] = {BATCH, 1, HEADS, DIM};
  int64_t cache_shape[] = {BATCH, CAPACITY, KV_HEADS, DIM};
  int64_t lengths_shape[] = {BATCH};
  const tessera_device cpu = {TESSERA_CPU, 0};
  const tessera_dtype fp32 = {TESSERA_FLOAT, 32, 1};
  const tessera_dtype int32 = {TESSERA_INT, 32, 1};
  const tessera_tensor tq = {q, cpu, 4, fp32, q_shape, NULL, 0};
  const tessera_tensor tk = {k, cpu, 4, fp32, cache_shape, NULL, 0};
  const tessera_tensor tv = {v, cpu, 4, fp32, cache_shape, NULL, 0};
  const tessera_tensor tout = {out, cpu, 4, fp32, q_shape, NULL, 0};
  const tessera_tensor tlengths = {lengths, cpu, 1, int32, lengths_shape, NULL, 0};

  tessera_attention args = TESSERA_ATTENTION_INIT;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &tout;
  args.cache_seqlens = &tlengths;

  tessera_plan* plan = NULL;
  if (!check(tessera_attention_plan_create(TESSERA_ATTENTION_DECODE, &args, &plan), "plan")) return 1;
  printf("tessera %s\n%s", tessera_version(), tessera_plan_explain(plan, TESSERA_EXPLAIN_TEXT));
  const size_t bytes = tessera_plan_workspace(plan);
  void* workspace = malloc(bytes > 0 ? bytes : 1);
  int ok = workspace != NULL;
  for (int token = 0; ok && token < CAPACITY; ++token) {
    for (int b = 0; b < BATCH; ++b) lengths[b] = token + 1;
    ok = check(tessera_attention_plan_run(plan, &args, workspace, bytes, NULL), "run");
    /* One key in the cache: the output is its value. */
    if (token == 0 && ok) ok = fabsf(out[0] - v[0]) < 1e-6f;
  }
  printf("%d tokens decoded, out[0] = %g\n", CAPACITY, (double)out[0]);

  tessera_plan_destroy(plan);
  free(workspace);
  free(out);
  free(v);
  free(k);
  free(q);
  return ok ? 0 : 1;
}
