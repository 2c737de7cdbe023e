// Runs ops through plans that are kept from call to call.
#pragma once

#include <functional>

#include "tensor.h"

namespace tessera::python {

// Runs the op on the tensors' device: on the CPU synchronously, on a GPU on PyTorch's current stream, with a workspace
// from PyTorch's allocator. q: args.q. Returns false, with an exception set, if it fails.
bool run(tessera_attention_op op, const tessera_attention& args, const View& q);

// What runs of every family share. follow_threads: the CPU backend uses as many threads as PyTorch. run_plan: calls
// run(workspace, bytes, stream) without the GIL, with a workspace of the plan's size on like's device.
bool follow_threads();
// PyTorch's current stream on a device; null on the CPU.
bool current_stream(tessera_device device, void** stream);
bool run_plan(const tessera_plan* plan, const View& like,
              const std::function<tessera_status(void* workspace, std::size_t bytes, void* stream)>& run);

// tessera._native.gemm: bindings/torch/gemm.cc.
PyObject* gemm(PyObject*, PyObject* const* values, Py_ssize_t count);
// bindings/torch/norm.cc and loss.cc.
PyObject* norm_forward(PyObject*, PyObject* const* values, Py_ssize_t count);
PyObject* norm_backward(PyObject*, PyObject* const* values, Py_ssize_t count);
PyObject* norm_rotary(PyObject*, PyObject* const* values, Py_ssize_t count);
PyObject* gmm_nll(PyObject*, PyObject* const* values, Py_ssize_t count);
PyObject* mlp_gmm_nll(PyObject*, PyObject* const* values, Py_ssize_t count);
PyObject* linear_cross_entropy(PyObject*, PyObject* const* values, Py_ssize_t count);
// tessera._native.mlp: bindings/torch/mlp.cc.
PyObject* mlp(PyObject*, PyObject* const* values, Py_ssize_t count);
// tessera._native.moe: bindings/torch/moe.cc.
PyObject* moe(PyObject*, PyObject* const* values, Py_ssize_t count);

// Raises TypeError unless a function has got as many arguments as it takes.
bool expect(const char* function, Py_ssize_t given, Py_ssize_t wanted);

// Raises tessera.Error with the library's error message unless status is TESSERA_OK.
bool succeeded(tessera_status status);

}  // namespace tessera::python
