/* Decode in C: a loop over tokens. Each call appends the token's key and value to a KV cache, rotates them and the query by
 * the token's position, and attends to everything so far, with a plan that is created once. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/attention.h>

enum { BATCH = 2, CAPACITY = 64, HEADS = 8, KV_HEADS = 2, DIM = 64 };

static void fill(float* values, size_t count) {
  for (size_t i = 0; i < count; ++i) values[i] = (float)rand() / (float)RAND_MAX - 0.5f;
}

static int check(tessera_status status, const char* what) {
  if (status == TESSERA_OK) return 1;
  fprintf(stderr, "%s: %s: %s\n", what, tessera_status_name(status), tessera_last_error());
  return 0;
}

int main(void) {
  static float q[BATCH * HEADS * DIM], k_new[BATCH * KV_HEADS * DIM], v_new[BATCH * KV_HEADS * DIM];
  static float k[BATCH * CAPACITY * KV_HEADS * DIM], v[BATCH * CAPACITY * KV_HEADS * DIM]; /* empty */
  static float out[BATCH * HEADS * DIM], cosines[CAPACITY * DIM / 2], sines[CAPACITY * DIM / 2];
  int32_t lengths[BATCH] = {0, 0};
  for (int position = 0; position < CAPACITY; ++position) {
    for (int i = 0; i < DIM / 2; ++i) {
      const double angle = position * pow(10000.0, -2.0 * i / DIM);
      cosines[position * DIM / 2 + i] = (float)cos(angle);
      sines[position * DIM / 2 + i] = (float)sin(angle);
    }
  }

  int64_t q_shape[] = {BATCH, 1, HEADS, DIM};
  int64_t new_shape[] = {BATCH, 1, KV_HEADS, DIM};
  int64_t cache_shape[] = {BATCH, CAPACITY, KV_HEADS, DIM};
  int64_t rotary_shape[] = {CAPACITY, DIM / 2};
  int64_t lengths_shape[] = {BATCH};
  const tessera_device cpu = {TESSERA_CPU, 0};
  const tessera_dtype fp32 = {TESSERA_FLOAT, 32, 1};
  const tessera_dtype int32 = {TESSERA_INT, 32, 1};
  const tessera_tensor tq = {q, cpu, 4, fp32, q_shape, NULL, 0};
  const tessera_tensor tk = {k, cpu, 4, fp32, cache_shape, NULL, 0};
  const tessera_tensor tv = {v, cpu, 4, fp32, cache_shape, NULL, 0};
  const tessera_tensor tout = {out, cpu, 4, fp32, q_shape, NULL, 0};
  const tessera_tensor tk_new = {k_new, cpu, 4, fp32, new_shape, NULL, 0};
  const tessera_tensor tv_new = {v_new, cpu, 4, fp32, new_shape, NULL, 0};
  const tessera_tensor tcos = {cosines, cpu, 2, fp32, rotary_shape, NULL, 0};
  const tessera_tensor tsin = {sines, cpu, 2, fp32, rotary_shape, NULL, 0};
  const tessera_tensor tlengths = {lengths, cpu, 1, int32, lengths_shape, NULL, 0};

  tessera_attention args = TESSERA_ATTENTION_INIT;
  args.q = &tq;
  args.k = &tk;
  args.v = &tv;
  args.out = &tout;
  args.cache_seqlens = &tlengths;
  args.k_new = &tk_new;
  args.v_new = &tv_new;
  args.rotary_cos = &tcos;
  args.rotary_sin = &tsin;

  tessera_plan* plan = NULL;
  if (!check(tessera_attention_plan_create(TESSERA_ATTENTION_DECODE, &args, &plan), "plan")) return 1;
  printf("tessera %s\n%s", tessera_version(), tessera_plan_explain(plan, TESSERA_EXPLAIN_TEXT));
  const size_t bytes = tessera_plan_workspace(plan);
  void* workspace = malloc(bytes > 0 ? bytes : 1);
  int ok = workspace != NULL;
  for (int token = 0; ok && token < CAPACITY; ++token) {
    /* A model computes these from the last token. */
    fill(q, sizeof q / sizeof *q);
    fill(k_new, sizeof k_new / sizeof *k_new);
    fill(v_new, sizeof v_new / sizeof *v_new);
    ok = check(tessera_attention_plan_run(plan, &args, workspace, bytes, NULL), "run");
    /* One key in the cache: the output is its value. */
    if (token == 0 && ok) ok = fabsf(out[0] - v_new[0]) < 1e-6f;
    if (ok) ok = v[token * KV_HEADS * DIM] == v_new[0];
    for (int b = 0; b < BATCH; ++b) lengths[b] += 1;
  }
  printf("%d tokens decoded, out[0] = %g\n", CAPACITY, (double)out[0]);

  /* The cache is full now: one more token is refused, and nothing is written. */
  if (ok && tessera_attention_plan_run(plan, &args, workspace, bytes, NULL) == TESSERA_INVALID_ARGUMENT) {
    printf("then: %s\n", tessera_last_error());
  } else {
    ok = 0;
  }
  tessera_plan_destroy(plan);
  free(workspace);
  return ok ? 0 : 1;
}
