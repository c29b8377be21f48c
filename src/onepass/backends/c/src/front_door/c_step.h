/* A call of a C kernel by a launcher. `CStep` in backends/front_door.py describes the fields. */
#pragma once

#include "python.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace onepass {

using Addresses = c10::SmallVector<uintptr_t, 24>;

// An address: that of a tensor, plus an offset in bytes. Tensors are numbered: inputs, then outputs, then counters.
struct Address {
  Py_ssize_t tensor;
  int64_t offset;

  static Address of(const pybind11::handle& given) {
    const auto pair = given.cast<pybind11::tuple>();
    return {pair[0].cast<Py_ssize_t>(), pair[1].cast<int64_t>()};
  }

  uintptr_t in(const Addresses& addresses) const {
    return tensor < 0 ? 0 : addresses[tensor] + static_cast<uintptr_t>(offset);
  }
};

// A call of a C kernel: onepass_forward, onepass_track or onepass_backward of src/onepass.c.
struct CStep {
  enum Kind { FORWARD, TRACK, BACKWARD } kind;
  void* function;
  std::string problem;
  std::vector<Address> tensors;  // one for each field of struct Tensors
  std::vector<std::pair<Address, Address>> copies;  // from, to: copied before the call; without `from`, zeros are written
  size_t copied_bytes;
  object threads;  // None for one thread, or a function that returns their number
  Address running[2];
  Py_ssize_t momentum;  // the argument that has it

  static CStep of(const pybind11::dict& given) {
    CStep step{};
    step.kind = static_cast<CStep::Kind>(given["kind"].cast<int>());
    step.function = reinterpret_cast<void*>(given["function"].cast<uintptr_t>());
    step.problem = given["problem"].cast<std::string>();
    for (const auto& tensor : given["tensors"].cast<pybind11::tuple>()) {
      step.tensors.push_back(Address::of(tensor));
    }
    for (const auto& copy : given["copies"].cast<pybind11::tuple>()) {
      const auto pair = copy.cast<pybind11::tuple>();
      step.copies.emplace_back(Address::of(pair[0]), Address::of(pair[1]));
    }
    step.copied_bytes = given["copied_bytes"].cast<size_t>();
    step.threads = given["threads"];
    for (int i = 0; i < 2; ++i) {
      step.running[i] = Address::of(given["running"].cast<pybind11::tuple>()[i]);
    }
    step.momentum = given["momentum"].cast<Py_ssize_t>();
    return step;
  }

  // Return whether the kernel ran.
  bool run(const Addresses& addresses, PyObject* const* given) const {
    std::vector<uintptr_t> pointers;
    pointers.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      pointers.push_back(tensor.in(addresses));
    }
    for (const auto& [from, to] : copies) {
      void* target = reinterpret_cast<void*>(to.in(addresses));
      if (from.tensor < 0) {
        std::memset(target, 0, copied_bytes);
      } else {
        std::memcpy(target, reinterpret_cast<const void*>(from.in(addresses)), copied_bytes);
      }
    }
    int64_t count = 1;
    if (!threads.is_none()) {
      count = own(PyObject_CallNoArgs(threads.ptr())).cast<int64_t>();
    }
    const double factor = kind == TRACK ? PyFloat_AsDouble(given[momentum]) : 0.0;
    if (PyErr_Occurred()) {  // the momentum is no number
      throw_python_error();
    }
    const void *packed = problem.data(), *fields = pointers.data();
    pybind11::gil_scoped_release others_may_run;
    switch (kind) {
      case FORWARD:
        return !reinterpret_cast<int (*)(const void*, const void*, int64_t)>(function)(packed, fields, count);
      case BACKWARD:
        return !reinterpret_cast<int (*)(const void*, const void*, int64_t, int64_t)>(function)(packed, fields, count, 1);
      default:
        return !reinterpret_cast<int (*)(const void*, const void*, int64_t, float*, float*, double)>(function)(
            packed,
            fields,
            count,
            reinterpret_cast<float*>(running[0].in(addresses)),
            reinterpret_cast<float*>(running[1].in(addresses)),
            factor);
    }
  }
};

}  // namespace onepass
