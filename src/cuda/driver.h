// The CUDA driver, opened with dlopen the first time it is needed. The part of cuda.h that is used is declared here,
// since the build needs no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/status.h"

namespace tessera::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctxTag*;
using CUmodule = struct CUmodTag*;
using CUfunction = struct CUfuncTag*;
using CUstream = struct CUstreamTag*;
using CUevent = struct CUeventTag*;
using CUgraph = struct CUgraphTag*;
using CUgraphExec = struct CUgraphExecTag*;

constexpr CUresult kCudaSuccess = 0;
constexpr CUresult kCudaOutOfMemory = 2;

// CUlaunchAttribute of cuda.h; one attribute is used.
struct alignas(8) LaunchAttribute {
  static constexpr int kProgrammaticStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
  int id;
  int unused;
  union {
    int pdl;
    char bytes[64];
  };
};
static_assert(sizeof(LaunchAttribute) == 72 && alignof(LaunchAttribute) == 8);

// CUlaunchConfig of cuda.h.
struct LaunchConfig {
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned dynamic_smem_bytes;
  CUstream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct Driver {
  CUresult (*init)(unsigned);
  CUresult (*driver_version)(int*);
  CUresult (*error_name)(CUresult, const char**);
  CUresult (*error_string)(CUresult, const char**);
  CUresult (*device_count)(int*);
  CUresult (*device_get)(CUdevice*, int);
  CUresult (*device_name)(char*, int, CUdevice);
  CUresult (*device_attribute)(int*, int, CUdevice);
  CUresult (*device_memory)(std::size_t*, CUdevice);
  CUresult (*primary_retain)(CUcontext*, CUdevice);
  CUresult (*context_push)(CUcontext);
  CUresult (*context_pop)(CUcontext*);
  CUresult (*context_current)(CUcontext*);
  CUresult (*module_load)(CUmodule*, const void*, unsigned, int*, void**);
  CUresult (*module_unload)(CUmodule);
  CUresult (*module_function)(CUfunction*, CUmodule, const char*);
  CUresult (*function_attribute)(int*, int, CUfunction);
  CUresult (*function_set_attribute)(CUfunction, int, int);
  CUresult (*launch)(const LaunchConfig*, CUfunction, void**, void**);
  CUresult (*memory_info)(std::size_t*, std::size_t*);
  CUresult (*allocate)(CUdeviceptr*, std::size_t);
  CUresult (*free)(CUdeviceptr);
  CUresult (*allocate_on_stream)(CUdeviceptr*, std::size_t, CUstream);
  CUresult (*free_on_stream)(CUdeviceptr, CUstream);
  CUresult (*copy_to_device)(CUdeviceptr, const void*, std::size_t, CUstream);
  CUresult (*copy_to_host)(void*, CUdeviceptr, std::size_t, CUstream);
  CUresult (*copy_on_device)(CUdeviceptr, CUdeviceptr, std::size_t, CUstream);
  CUresult (*set_bytes)(CUdeviceptr, unsigned char, std::size_t, CUstream);
  CUresult (*set_words16)(CUdeviceptr, unsigned short, std::size_t, CUstream);
  CUresult (*set_words32)(CUdeviceptr, unsigned, std::size_t, CUstream);
  CUresult (*stream_create)(CUstream*, unsigned);
  CUresult (*stream_destroy)(CUstream);
  CUresult (*stream_synchronize)(CUstream);
  CUresult (*event_create)(CUevent*, unsigned);
  CUresult (*event_destroy)(CUevent);
  CUresult (*event_record)(CUevent, CUstream);
  CUresult (*event_synchronize)(CUevent);
  CUresult (*event_elapsed)(float*, CUevent, CUevent);
  CUresult (*capture_begin)(CUstream, int);
  CUresult (*capture_end)(CUstream, CUgraph*);
  CUresult (*graph_instantiate)(CUgraphExec*, CUgraph, unsigned long long);
  CUresult (*graph_launch)(CUgraphExec, CUstream);
  CUresult (*graph_destroy)(CUgraph);
  CUresult (*graph_exec_destroy)(CUgraphExec);
  // Null before CUDA 12.0: map, data type, rank, address, extents, strides, box, element strides, interleave, swizzle,
  // L2 promotion, fill.
  CUresult (*tensor_map_encode)(void*, int, unsigned, void*, const std::uint64_t*, const std::uint64_t*,
                                const std::uint32_t*, const std::uint32_t*, int, int, int, int);
};

// The driver, opened and initialised; or TESSERA_NO_DEVICE and the reason. After a failure, the next call tries again.
Result<const Driver*> driver();

// OK for kCudaSuccess; else what failed, with the driver's name and description of the error. If an image was refused
// and NVRTC is newer than the driver, the message says so.
Status status_of(const Driver& driver, CUresult result, const std::string& what);

}  // namespace tessera::cuda
