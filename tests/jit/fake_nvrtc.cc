// An NVRTC that only says its version, TESSERA_FAKE_MAJOR.TESSERA_FAKE_MINOR, and compiles everything to "fake".
#include <cstddef>
#include <cstring>

#define FAKE extern "C" __attribute__((visibility("default")))

namespace {

// Two builds of one version differ in this.
[[maybe_unused]] __attribute__((used)) const char kBuild[] = TESSERA_FAKE_BUILD;
constexpr char kImage[] = "fake";

int size_of_image(std::size_t* size) {
  *size = sizeof kImage;
  return 0;
}
int image(char* bytes) {
  std::memcpy(bytes, kImage, sizeof kImage);
  return 0;
}

}  // namespace

FAKE int nvrtcVersion(int* major, int* minor) {
  *major = TESSERA_FAKE_MAJOR;
  *minor = TESSERA_FAKE_MINOR;
  return 0;
}
FAKE const char* nvrtcGetErrorString(int) { return "no error"; }
FAKE int nvrtcCreateProgram(void** program, const char*, const char*, int, const char* const*, const char* const*) {
  *program = program;
  return 0;
}
FAKE int nvrtcDestroyProgram(void**) { return 0; }
FAKE int nvrtcCompileProgram(void*, int, const char* const*) { return 0; }
FAKE int nvrtcGetProgramLogSize(void*, std::size_t* size) { return size_of_image(size); }
FAKE int nvrtcGetProgramLog(void*, char* bytes) { return image(bytes); }
FAKE int nvrtcGetCUBINSize(void*, std::size_t* size) { return size_of_image(size); }
FAKE int nvrtcGetCUBIN(void*, char* bytes) { return image(bytes); }
FAKE int nvrtcGetPTXSize(void*, std::size_t* size) { return size_of_image(size); }
FAKE int nvrtcGetPTX(void*, char* bytes) { return image(bytes); }
