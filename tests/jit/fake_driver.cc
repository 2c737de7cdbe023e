// A driver that only says which CUDA it supports: 12.4.
extern "C" __attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
  *version = 12040;
  return 0;
}
